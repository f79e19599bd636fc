// The tasks of one handler call on the pool's threads.
#include <chrono>
#include <stdexcept>

#include "cpu/parallel.h"
#include "rig.h"

namespace ffi = xla::ffi;

namespace native_tests {
namespace {

int num_tasks_of_round(int round) { return 1 + round % 9; }

// A handler whose tasks count; every third call, one of them raises.
ffi::Error count_tasks(ffi::ThreadPool pool, ffi::RemainingArgs, ffi::RemainingRets, int64_t round) {
  const int num_tasks = num_tasks_of_round(static_cast<int>(round));
  std::vector<int> counts(num_tasks);
  try {
    jaxserve::cpu::run_tasks(pool, num_tasks, pool.num_threads(), [&](int64_t task) {
      if (round % 10 == 0 && task % 2 == 1) std::this_thread::sleep_for(std::chrono::microseconds(100));
      counts[task] += 1;
      if (round % 3 == 0 && task == num_tasks / 2) throw std::runtime_error("a task failed");
    });
  } catch (const std::runtime_error& error) {
    for (int count : counts) {
      if (count > 1) return ffi::Error::Internal("a task ran twice");
    }
    return ffi::Error::Internal(error.what());
  }
  for (int count : counts) {
    if (count != 1) return ffi::Error::Internal("a task ran " + std::to_string(count) + " times");
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(count_tasks_handler, count_tasks,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>(
                                  "round"));

TEST(tasks_run_once_and_their_exceptions_reach_the_caller) {
  ThreadPool pool(4);
  Threads threads;
  for (int t = 0; t < 2; ++t) {
    threads.start([&] {
      for (int round = 0; round < 300; ++round) {
        const std::string error = call(count_tasks_handler, {}, {}, {{"round", int64_t{round}}}, &pool);
        if (error != (round % 3 == 0 ? "a task failed" : "")) fail(__FILE__, __LINE__, error);
      }
    });
  }
  threads.join();
}

}  // namespace
}  // namespace native_tests
