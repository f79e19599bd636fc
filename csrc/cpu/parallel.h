// Runs the tasks of one handler call on the calling thread and on XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxserve::cpu {

constexpr int kSpins = 1000;  // some 30 us

// Tells the processor that this thread spins.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls work(task) once for each task in [0, num_tasks), on the caller and up to num_threads - 1 pool threads. Each has
// a share of neighbouring tasks, does those in order, and then takes what is left of the other shares. The caller never
// waits for a task nobody has started, so a busy pool cannot stall it; a pool thread that comes late finds no task, and
// touches nothing but the shared state.
// Of exceptions that tasks raise, the first is raised again once every task has ended: none may leave a pool thread,
// and `work` must outlive those still running.
template <typename Work>
void run_tasks(xla::ffi::ThreadPool& pool, int64_t num_tasks, int64_t num_threads, const Work& work) {
  num_threads = std::min(num_threads, num_tasks);
  if (num_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) work(task);
    return;
  }
  struct alignas(64) Share {  // in a cache line of its own
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct State {
    explicit State(int64_t num_shares) : shares(num_shares) {}
    std::vector<Share> shares;
    std::atomic<int64_t> num_threads{0};
    std::atomic<int64_t> finished{0};
    std::mutex mutex;
    std::condition_variable all_finished;
    std::exception_ptr failure;  // guarded by mutex
  };
  auto state = std::make_shared<State>(num_threads);
  for (int64_t i = 0; i < num_threads; ++i) {
    state->shares[i].next = num_tasks * i / num_threads;
    state->shares[i].end = num_tasks * (i + 1) / num_threads;
  }
  const Work* shared_work = &work;  // alive while a task is unfinished, and not called otherwise
  const auto take_tasks = [state, shared_work, num_tasks, num_threads] {
    const int64_t own = state->num_threads.fetch_add(1);
    for (int64_t i = 0; i < num_threads; ++i) {
      Share& share = state->shares[(own + i) % num_threads];
      while (true) {
        const int64_t task = share.next.fetch_add(1);
        if (task >= share.end) break;
        try {
          (*shared_work)(task);
        } catch (...) {
          std::lock_guard<std::mutex> lock(state->mutex);
          if (state->failure == nullptr) state->failure = std::current_exception();
        }
        if (state->finished.fetch_add(1) + 1 == num_tasks) {
          std::lock_guard<std::mutex> lock(state->mutex);
          state->all_finished.notify_all();
        }
      }
    }
  };
  try {
    for (int64_t i = 1; i < num_threads; ++i) pool.Schedule([take_tasks] { take_tasks(); });
  } catch (const std::exception&) {
    // No memory for another thread's task: those that there are do it all.
  }
  take_tasks();
  // What is left ends in microseconds, unless its thread lost its core: sleeping and being woken would take longer.
  for (int spins = 0; spins < kSpins && state->finished.load(std::memory_order_acquire) != num_tasks; ++spins) relax();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] { return state->finished.load() == num_tasks; });
  // Taken out: a pool thread that comes late must not be the last to let go of it.
  const std::exception_ptr failure = std::exchange(state->failure, nullptr);
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace jaxserve::cpu
