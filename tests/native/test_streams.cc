// The schedule stream: writes, staging, poison, destruction with work queued, and several threads at once.
#include <chrono>

#include "rig.h"

namespace native_tests {
namespace {

TEST(rows_land_where_they_belong_whoever_writes) {
  constexpr int kProducers = 4, kWrites = 400;
  const auto buffer = make_buffer(2 * kProducers, 5);
  const auto ring = make_ring("write_done");
  twin::Stream stream(3, 16, kLong);  // few and small blocks: they are waited for, and grow
  std::atomic<bool> stop{false};
  Threads threads, watcher;
  std::atomic<int> num_looks{0};
  watcher.start([&] {
    for (; !stop; ++num_looks) {
      CHECK(stream.stats().num_staging_in_use <= 3);
      CHECK(stream.error().empty());
      (void)stream.is_done();
    }
  });
  for (int32_t p = 0; p < kProducers; ++p) {
    threads.start([&, p] {
      for (int32_t i = 1; i <= kWrites; ++i) {
        write(stream, buffer, {p, p + kProducers}, i * kProducers + p);
        while (num_looks < i / 10) std::this_thread::yield();  // however busy the machine is
      }
    });
  }
  threads.join();
  stop = true;
  watcher.join();
  const uint64_t generation = ring->reserve();
  stream.record(ring, generation);
  CHECK(ring->wait(generation, kLong));
  for (int32_t row = 0; row < 2 * kProducers; ++row) {
    for (int c = 0; c < 5; ++c) CHECK(rows_of(buffer)[row * 5 + c] == kWrites * kProducers + row % kProducers);
  }
  stream.sync();
  CHECK(stream.stats().num_staging_in_use == 0 && stream.stats().num_copies == kProducers * kWrites);
}

TEST(a_stream_is_destroyed_with_work_queued) {
  for (int round = 0; round < 40; ++round) {
    const auto buffer = make_buffer(1, 3);
    const auto gate = make_ring("gate", 2), done = make_ring("done", 2);
    const uint64_t opened = gate->reserve(), recorded = done->reserve();
    Threads threads;
    {
      twin::Stream stream(2, 64, kLong);
      threads.start([&] {
        if (round % 3 != 0) std::this_thread::sleep_for(std::chrono::microseconds(30 * round));
        round % 5 == 0 ? gate->abandon(opened) : gate->record(opened);
      });
      stream.wait(gate, opened, "marker");
      write(stream, buffer, {0}, round);
      stream.record(done, recorded);
    }
    threads.join();
    CHECK(done->wait(recorded, kLong));
    CHECK(rows_of(buffer)[2] == round);
    CHECK(gate->num_waiters() == 0);
  }
}

TEST(a_wait_that_times_out_poisons_until_reset) {
  const auto buffer = make_buffer(2, 1);
  const auto owed = make_ring("owed"), done = make_ring("done");
  for (int round = 1; round <= 20; ++round) {
    twin::Stream stream(4, 64, 0.002);
    const uint64_t never = owed->reserve(), skipped = done->reserve();
    stream.wait(owed, never, "marker");
    write(stream, buffer, {0}, -1);
    stream.record(done, skipped);
    CHECK(!done->wait(skipped, kLong));
    CHECK_RAISES(stream.sync(), NativeError, "was not recorded within");
    CHECK(stream.error().find("was not recorded within") != std::string::npos);
    CHECK(rows_of(buffer)[0] == round - 1);
    stream.reset();
    owed->abandon(never);
    write(stream, buffer, {0}, round);
    const uint64_t recorded = done->reserve();
    stream.record(done, recorded);
    CHECK(done->wait(recorded, kLong));
    CHECK(rows_of(buffer)[0] == round);
    stream.sync();
    CHECK(stream.stats().num_staging_in_use == 0);
  }
}

TEST(a_reset_meets_errors_and_questions) {
  const auto buffer = make_buffer(1, 1);
  const auto owed = make_ring("owed", 64), done = make_ring("done", 64);
  twin::Stream stream(2, 16, 0.0005);
  std::atomic<bool> stop{false};
  Threads threads;
  threads.start([&] {
    while (!stop) {
      stream.reset();
      (void)stream.error();
      (void)stream.stats();
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 60; ++i) {
    const uint64_t never = owed->reserve(), recorded = done->reserve();
    stream.wait(owed, never, "marker");
    write(stream, buffer, {0}, i);
    stream.record(done, recorded);
    (void)done->wait(recorded, kLong);  // recorded or given up, but never left
    owed->abandon(never);
  }
  stop = true;
  threads.join();
  CHECK(done->num_owed() == 0 && owed->num_waiters() == 0);
}

TEST(indices_outside_the_buffer_are_refused) {
  const auto buffer = make_buffer(4, 2);
  twin::Stream stream(1, 16, kLong);
  CHECK_RAISES(write(stream, buffer, {0, 4}, 1), NativeError, "row 4 is outside a buffer of 4 rows");
  CHECK_RAISES(write(stream, buffer, {-1}, 1), NativeError, "row -1 is outside");
  const int32_t row = 0, values[2] = {0, 0};
  CHECK_RAISES(stream.write_rows(buffer, &row, 1, 1, values, 2), NativeError, "columns 1..3 are outside");
}

// Every allocation of construction and of a few operations fails in turn; the stream goes on, nothing stays held.
TEST(an_allocation_that_fails_leaves_the_stream_usable) {
  const auto buffer = make_buffer(4, 8);
  const auto ring = make_ring("ring", 4);
  for (int64_t n = 1;; ++n) {
    const NothingLeft before;
    Faults::instance().fail_nth("allocate", n);
    try {
      twin::Stream stream(2, 8, kLong);
      for (int32_t i = 0; i < 3; ++i) {
        const uint64_t generation = ring->reserve();
        try {
          write(stream, buffer, {0, 1}, i);
          stream.record(ring, generation);
          stream.wait(ring, generation, "marker");
        } catch (const InjectedFault&) {
          ring->abandon(generation);
        }
      }
      stream.sync();
      CHECK(stream.stats().num_staging_in_use == 0);
    } catch (const InjectedFault&) {
    }
    CHECK(ring->num_waiters() == 0 && ring->num_owed() == 0);
    const bool all_tried = Faults::instance().failures("allocate") == 0;
    Faults::instance().clear();
    NothingLeft(before).check();
    if (all_tried) {
      CHECK(n > 3);
      break;
    }
  }
}

TEST(a_copy_that_fails_frees_its_block_and_is_told) {
  const auto buffer = make_buffer(1, 1);
  const auto ring = make_ring("ring");
  twin::Stream stream(1, 64, kLong);
  Faults::instance().fail_nth("copy", 1);
  std::string told;
  try {  // on CUDA the caller is told, on the CPU the stream says so
    write(stream, buffer, {0}, 5);
    stream.sync();
  } catch (const NativeError& error) {
    told = error.what();
  }
  CHECK(told.find("injected fault: copy 1") != std::string::npos);
  CHECK(stream.stats().num_staging_in_use == 0);
  stream.reset();
  write(stream, buffer, {0}, 6);
  stream.sync();
  CHECK(rows_of(buffer)[0] == 6);
}

TEST(a_record_that_fails_leaves_nobody_waiting) {
  const auto ring = make_ring("ring");
  twin::Stream stream(1, 64, kLong);
  const uint64_t generation = ring->reserve();
  Faults::instance().fail_nth("record", 1);
  std::string told;
  try {  // on CUDA the caller is told, and gives the record up; on the CPU the stream does both
    stream.record(ring, generation);
    CHECK(!ring->wait(generation, kLong));
    stream.sync();
  } catch (const NativeError& error) {
    told = error.what();
    ring->abandon(generation);
  }
  CHECK(told.find("injected fault: record 1") != std::string::npos);
  CHECK(ring->num_owed() == 0);
}

}  // namespace
}  // namespace native_tests
