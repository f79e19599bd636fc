// Event rings: generations, waits, records given up, and threads that do all of it at once.
#include <chrono>
#include <random>

#include "rig.h"

namespace native_tests {
namespace {

TEST(a_ring_needs_two_slots) { CHECK_RAISES(make_ring("ring", 1), NativeError, "at least 2 slots, got 1"); }

TEST(a_slot_is_not_reserved_while_it_owes_or_is_awaited) {
  const auto ring = make_ring("ring", 2);
  CHECK(ring->reserve() == 1 && ring->reserve() == 2);
  CHECK_RAISES(ring->reserve(), NativeError, "still owes the record of generation 1");
  CHECK(ring->num_owed() == 2);
  ring->announce_wait(1);
  ring->record(1);
  CHECK_RAISES(ring->reserve(), NativeError, "generation 1 is still awaited");
  CHECK(ring->num_owed() == 1 && ring->num_waiters() == 1);
  ring->record(2);
#ifndef JAXSERVE_CUDA
  CHECK(ring->wait(1, kLong, /*announced=*/true));
  CHECK(ring->reserve() == 3);
  CHECK(ring->num_waiters() == 0);
#endif
}

TEST(a_wait_that_times_out_names_what_it_found) {
  const auto ring = make_ring("ring");
  ring->record(ring->reserve());
  const uint64_t generation = ring->reserve();
  CHECK_RAISES(ring->wait(generation, 0.005), WaitTimeout, "newest recorded is 1, newest reserved is 2");
  CHECK(ring->num_waiters() == 0);
  ring->abandon(generation);
  CHECK(!ring->wait(generation, kLong));
}

TEST(records_waits_and_abandons_meet_in_every_order) {
  constexpr int kWaiters = 3;
  constexpr uint64_t kGenerations = 1500;
  const auto ring = make_ring("ring", 4);
  std::atomic<uint64_t> reserved{0};
  std::atomic<int> given_up{0}, recorded{0};
  Threads threads;
  for (int w = 0; w < kWaiters; ++w) {
    threads.start([&, w] {
      std::mt19937 random(w);
      uint64_t seen = 0;
      while (seen < kGenerations) {
        const uint64_t newest = reserved.load();
        if (newest == seen) {
          std::this_thread::yield();
          continue;
        }
        seen = newest;
        if (random() % 8 == 0) {
          try {
            ring->wait(newest, 1e-6);
          } catch (const WaitTimeout&) {
          }
          continue;
        }
        (ring->wait(newest, kLong) ? recorded : given_up) += 1;
        CHECK(ring->is_done(newest));
      }
    });
  }
  threads.start([&] {
    std::mt19937 random(17);
    for (uint64_t g = 1; g <= kGenerations; ++g) {
      while (true) {  // a slot that is still awaited is refused
        try {
          CHECK(ring->reserve() == g);
          break;
        } catch (const NativeError&) {
          std::this_thread::yield();
        }
      }
      reserved.store(g);
      std::thread other([&] { ring->abandon(g); });
      if (random() % 2 == 0) ring->record(g);
      other.join();
      ring->record(g > 4 ? g - 4 : g);  // a late record of a slot that serves another generation
    }
  });
  threads.join();
  CHECK(ring->num_owed() == 0 && ring->num_waiters() == 0);
  CHECK(recorded + given_up > 0);
}

TEST(a_wait_that_fails_pins_nothing) {
  const auto ring = make_ring("ring", 2);
  ring->record(ring->reserve());
  Faults::instance().fail_nth("wait", 1);
  CHECK_RAISES(ring->wait(1, kLong), InjectedFault, "ring failed: injected fault: wait 1");
  CHECK(ring->num_waiters() == 0);
}

TEST(a_record_that_fails_is_still_owed) {
  const auto ring = make_ring("ring", 2);
  const uint64_t generation = ring->reserve();
  Faults::instance().fail_nth("record", 1);
  CHECK_RAISES(ring->record(generation), InjectedFault, "injected fault: record 1");
  CHECK(ring->num_owed() == 1 && !ring->is_done(generation));
  ring->record(generation);
  CHECK(ring->num_owed() == 0);
}

TEST(a_reservation_that_fails_takes_no_generation) {
  const auto ring = make_ring("ring", 2);
  Faults::instance().fail_nth("reserve", 1);
  CHECK_RAISES(ring->reserve(), InjectedFault, "injected fault: reserve 1");
  CHECK(ring->newest_reserved() == 0 && ring->reserve() == 1);
}

TEST(faults_and_hold_points_are_armed_beside_running_threads) {
  const auto ring = make_ring("ring");
  std::atomic<bool> stop{false};
  std::atomic<int> failures{0};
  Threads threads;
  threads.start([&] {
    while (!stop) {
      HoldPoints::instance().pass("somewhere");
      try {
        ring->record(ring->reserve());
      } catch (const NativeError&) {
        failures += 1;
        if (ring->num_owed() > 0) ring->abandon(ring->newest_reserved());
      }
    }
  });
  for (int i = 0; i < 200; ++i) {
    Faults::instance().fail_nth(i % 2 == 0 ? "record" : "reserve", 1 + i % 3, 2);
    HoldPoints::instance().delay("somewhere", 1);
    for (int spin = 0; spin < 20 && Faults::instance().failures(i % 2 == 0 ? "record" : "reserve") == 0; ++spin) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    Faults::instance().clear();
    HoldPoints::instance().clear();
  }
  stop = true;
  threads.join();
  CHECK(failures > 0);
}

}  // namespace
}  // namespace native_tests
