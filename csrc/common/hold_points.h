// Hold points: named places where a test can stall the real code, by a delay or by a gate it opens later.
//
// They cost one relaxed atomic load while nothing is armed, so they stay in release builds: the race tests run the code
// that serves.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace jaxserve {

class HoldPoints {
 public:
  static HoldPoints& instance();

  // Every later pass through `name` sleeps this long. Zero removes the delay.
  void delay(const std::string& name, int64_t microseconds);
  // Passes through `name` block until open(name), at most 60 s.
  void close(const std::string& name);
  void open(const std::string& name);
  // Removes every delay and opens every gate.
  void clear();
  // Passes through `name` since it was first armed.
  int64_t hits(const std::string& name);

  // Called by the code under test.
  void pass(const char* name) {
    if (armed_.load(std::memory_order_relaxed)) pass_armed(name);
  }
  // As pass, but returns the delay in microseconds instead of sleeping: the caller stalls a device stream with it.
  int64_t pass_without_sleep(const char* name) {
    return armed_.load(std::memory_order_relaxed) ? pass_gate(name) : 0;
  }

 private:
  struct Point {
    int64_t delay_us = 0;
    bool closed = false;
    int64_t hits = 0;
  };

  void pass_armed(const char* name);
  // Counts the pass, waits for the gate, returns the delay.
  int64_t pass_gate(const char* name);

  std::atomic<bool> armed_{false};
  std::mutex mutex_;
  std::condition_variable opened_;
  std::map<std::string, Point> points_;  // guarded by mutex_
};

}  // namespace jaxserve
