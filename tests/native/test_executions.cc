// Whole steps: a host that plans, a schedule stream, and executions that snapshot and record, many at once.
#include <condition_variable>
#include <deque>
#include <random>

#include "rig.h"

namespace native_tests {
namespace {

LaunchTicket ticket_of(const Fences& fences, uint64_t write_done, uint64_t marker, uint64_t step_done, uint64_t step) {
  LaunchTicket ticket{};
  ticket.channel = fences.number;
  ticket.write_done = write_done;
  ticket.read_done_marker = marker;
  ticket.step_done = step_done;
  ticket.step_number = step;
  return ticket;
}

// Launches, in order, one at a time, as XLA's executions of one device.
class LaunchQueue {
 public:
  void put(LaunchTicket ticket) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tickets_.push_back(ticket);
    }
    changed_.notify_one();
  }
  LaunchTicket take() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !tickets_.empty(); });
    const LaunchTicket ticket = tickets_.front();
    tickets_.pop_front();
    return ticket;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<LaunchTicket> tickets_;  // guarded by mutex_
};

// One engine: every step rewrites all rows in place with its number; its execution must see that number in all of them,
// although the host is a step ahead. Some launches fail and give their records up.
void serve(int seed, int num_steps) {
  constexpr int kRows = 6;
  std::mt19937 random(seed);
  Fences fences;
  const auto buffer = make_buffer(kRows, 4);
  twin::Stream stream(4, 32, kLong);
  LaunchQueue queue;
  std::atomic<int> num_seen{0};
  std::string wrong;  // the executor goes on after a mistake, or the host would wait for it
  Threads threads;
  threads.start([&] {
    Executor executor;
    std::vector<int32_t> copy;
    while (true) {
      const LaunchTicket ticket = queue.take();
      if (ticket.step_number == 0) return;
      const std::string error = executor.snapshot(ticket, buffer, {5, 0, 1, 2, 3, 4}, copy);
      if (!error.empty() && wrong.empty()) wrong = error;
      for (int32_t value : copy) {
        if (value != static_cast<int32_t>(ticket.step_number) && wrong.empty()) {
          wrong = "step " + std::to_string(ticket.step_number) + " read " + std::to_string(value);
        }
      }
      num_seen += 1;
      if (const std::string end_error = executor.record_end(ticket); wrong.empty()) wrong = end_error;
    }
  });
  int num_launched = 0;
  std::deque<uint64_t> in_flight;
  const auto collect = [&](std::size_t may_stay) {
    for (; in_flight.size() > may_stay; in_flight.pop_front()) (void)fences.step_done->wait(in_flight.front(), kLong);
  };
  for (int step = 1; step <= num_steps; ++step) {
    write(stream, buffer, {0, 1, 2, 3, 4, 5}, step);
    const uint64_t written = fences.write_done->reserve();
    stream.record(fences.write_done, written);
    const uint64_t read = fences.read_done->reserve(), done = fences.step_done->reserve();
    if (random() % 16 == 0) {  // the launch fails
      fences.read_done->abandon(read);
      fences.step_done->abandon(done);
    } else {
      queue.put(ticket_of(fences, written, read, done, step));
      num_launched += 1;
    }
    stream.wait(fences.read_done, read, "marker");  // the barrier
    in_flight.push_back(done);
    collect(1);
  }
  collect(0);
  queue.put(LaunchTicket{});
  threads.join();
  if (!wrong.empty()) fail(__FILE__, __LINE__, wrong);
  stream.sync();
  CHECK(num_seen == num_launched);
  for (const auto& ring : {fences.write_done, fences.read_done, fences.step_done}) {
    CHECK(ring->num_owed() == 0 && ring->num_waiters() == 0);
  }
  CHECK(stream.stats().num_staging_in_use == 0);
}

TEST(engines_beside_each_other_read_what_was_planned_for_them) {
  Threads threads;
  for (int seed = 1; seed <= 3; ++seed) threads.start([seed] { serve(seed, 500); });
  threads.join();
}

TEST(the_journal_keeps_up_with_engines_and_is_drained_meanwhile) {
  constexpr int kSteps = 150;
  auto& journal = jaxserve::Journal::instance();
  journal.start(1 << 20);
  std::atomic<bool> stop{false};
  std::map<uint32_t, int> counts;
  uint64_t num_dropped = 0;
  const auto drain = [&] {
    std::vector<jaxserve::JournalEntry> entries;
    num_dropped += journal.drain(entries);
    for (const jaxserve::JournalEntry& entry : entries) counts[entry.kind] += 1;
  };
  Threads drainer, engines;
  drainer.start([&] {
    while (!stop) {
      drain();
      (void)journal.names();
      std::this_thread::yield();
    }
  });
  for (int seed = 4; seed <= 5; ++seed) engines.start([seed] { serve(seed, kSteps); });
  engines.join();
  stop = true;
  drainer.join();
  journal.stop();
  drain();
  CHECK(num_dropped == 0);
  CHECK(counts[static_cast<uint32_t>(jaxserve::JournalKind::kReserve)] == 2 * 3 * kSteps);
  CHECK(counts[static_cast<uint32_t>(jaxserve::JournalKind::kRelease)] > 2 * 2 * kSteps);
}

// Closed after each number of executions, and looked up until it is: relaxed counts order nothing, so whatever the
// machine's speed, a lookup that takes no lock races with the closing.
TEST(a_channel_is_closed_while_executions_run) {
  constexpr int kThreads = 2, kExecutions = 3;
  for (int round = 0; round < 28; ++round) {
    const auto buffer = make_buffer(2, 2);
    auto fences = std::make_unique<Fences>();
    const uint64_t number = fences->number;
    std::vector<uint64_t> generations;
    for (int i = 0; i < kThreads * kExecutions; ++i) generations.push_back(fences->read_done->reserve());
    std::atomic<int> num_executed{0}, num_looking{0};
    std::atomic<bool> closed{false};
    Threads threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.start([&, t] {
        Executor executor;
        std::vector<int32_t> copy;
        for (int i = 0; i < kExecutions; ++i) {
          LaunchTicket ticket{};
          ticket.channel = number;
          ticket.read_done_marker = generations[kExecutions * t + i];
          CHECK(executor.snapshot(ticket, buffer, {1}, copy).empty());  // closed: it records nothing
          CHECK(executor.record_end(ticket).empty());
          num_executed.fetch_add(1, std::memory_order_relaxed);
        }
        do {
          (void)twin::find_channel(number);
          num_looking.fetch_add(1, std::memory_order_relaxed);
        } while (!closed.load(std::memory_order_relaxed));
        CHECK(twin::find_channel(number) == nullptr);
      });
    }
    const int num_before = round % (kThreads * kExecutions + 1);
    while (num_executed.load(std::memory_order_relaxed) < num_before) std::this_thread::yield();
    if (num_before == kThreads * kExecutions) {
      while (num_looking.load(std::memory_order_relaxed) == 0) std::this_thread::yield();
    }
    fences.reset();
    closed.store(true, std::memory_order_relaxed);
    threads.join();
  }
}

TEST(a_launch_of_a_closed_engine_does_not_read_unwritten_rows) {
#ifndef JAXSERVE_CUDA  // there a closed channel's handlers are warm-up
  auto fences = std::make_unique<Fences>();
  const LaunchTicket ticket = ticket_of(*fences, fences->write_done->reserve(), 0, 0, 7);
  fences.reset();
  Executor executor;
  std::vector<int32_t> copy;
  const std::string error = executor.snapshot(ticket, make_buffer(1, 1), {0}, copy);
  CHECK(error.find("step 7 names row writes of an engine that is closed") != std::string::npos);
#endif
}

TEST(writes_given_up_or_late_fail_the_snapshot) {
  Fences fences(/*timeout_s=*/0.005);
  const auto buffer = make_buffer(1, 1);
  Executor executor;
  std::vector<int32_t> copy;
  const uint64_t late = fences.write_done->reserve();
  std::string error = executor.snapshot(ticket_of(fences, late, 0, 0, 1), buffer, {0}, copy);
  CHECK(error.find("was not recorded within") != std::string::npos);
  fences.write_done->abandon(late);
  error = executor.snapshot(ticket_of(fences, late, 0, 0, 1), buffer, {0}, copy);
  CHECK(error.find("the row writes of step 1 were given up") != std::string::npos);
}

TEST(every_operation_of_a_handler_that_fails_fails_the_execution) {
  const auto buffer = make_buffer(1, 1);
  Executor executor;
  std::vector<int32_t> copy;
  for (const char* kind : {"wait", "copy", "record"}) {
    Fences fences;
    fences.write_done->record(fences.write_done->reserve());
    const LaunchTicket ticket = ticket_of(fences, 1, fences.read_done->reserve(), fences.step_done->reserve(), 1);
    Faults::instance().fail_nth(kind, 1);
    const std::string error = executor.snapshot(ticket, buffer, {0}, copy);
    CHECK(error.find(std::string("injected fault: ") + kind + " 1") != std::string::npos);
    // It runs no later handler, so what it owes is given up.
    CHECK(!fences.read_done->wait(1, kLong) && !fences.step_done->wait(1, kLong));
    const LaunchTicket next = ticket_of(fences, 1, fences.read_done->reserve(), fences.step_done->reserve(), 2);
    Faults::instance().clear();
    CHECK(executor.snapshot(next, buffer, {0}, copy).empty());
    Faults::instance().fail_nth("record", 1);
    CHECK(executor.record_end(next).find("injected fault: record 1") != std::string::npos);
    CHECK(fences.read_done->wait(2, kLong) && !fences.step_done->wait(2, kLong));
    Faults::instance().clear();
  }
}

#ifndef JAXSERVE_CUDA  // there the kernel clamps, and tells the host
TEST(a_row_outside_its_table_is_refused) {
  Executor executor;
  std::vector<int32_t> copy;
  const std::string error = executor.snapshot(LaunchTicket{}, make_buffer(4, 16), {0, 4}, copy);
  CHECK(error.find("row id 4 at position 1 is outside a table of 4 rows") != std::string::npos);
}
#endif

TEST(an_export_outlives_its_buffer) {
  for (int round = 0; round < 20; ++round) {
    auto buffer = make_buffer(2, 2);
    std::vector<DLManagedTensorAbi*> exports = {buffer->to_dlpack(), buffer->to_dlpack()};
    Threads threads;
    for (DLManagedTensorAbi* exported : exports) {
      threads.start([exported] {
        const DLTensorAbi& tensor = exported->dl_tensor;
        CHECK(tensor.ndim == 2 && tensor.shape[1] == 2);
        CHECK(static_cast<const int32_t*>(tensor.data)[3] == 0);
        exported->deleter(exported);
      });
    }
    buffer.reset();
    threads.join();
  }
}

TEST(buffers_rings_and_channels_whose_allocation_fails_leave_nothing) {
  for (int64_t n = 1;; ++n) {
    const NothingLeft before;
    Faults::instance().fail_nth("allocate", n);
    try {
      const auto buffer = make_buffer(3, 3);
      DLManagedTensorAbi* exported = buffer->to_dlpack();
      exported->deleter(exported);
      Fences fences;
    } catch (const InjectedFault&) {
    }
    const bool all_tried = Faults::instance().failures("allocate") == 0;
    Faults::instance().clear();
    NothingLeft(before).check();
    if (all_tried) {
      CHECK(n >= 6);
      return;
    }
  }
}

}  // namespace
}  // namespace native_tests
