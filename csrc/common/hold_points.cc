#include "common/hold_points.h"

#include <chrono>
#include <thread>

namespace jaxserve {
namespace {
constexpr auto kGateLimit = std::chrono::seconds(60);  // a forgotten gate must not hang a test run for ever
}

HoldPoints& HoldPoints::instance() {
  static HoldPoints* points = new HoldPoints();  // never destroyed: handlers may still pass at process exit
  return *points;
}

void HoldPoints::delay(const std::string& name, int64_t microseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  points_[name].delay_us = microseconds;
  armed_.store(true, std::memory_order_relaxed);
}

void HoldPoints::close(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  points_[name].closed = true;
  armed_.store(true, std::memory_order_relaxed);
}

void HoldPoints::open(const std::string& name) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    points_[name].closed = false;
  }
  opened_.notify_all();
}

void HoldPoints::clear() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    armed_.store(false, std::memory_order_relaxed);
    for (auto& entry : points_) entry.second = Point{};
  }
  opened_.notify_all();
}

int64_t HoldPoints::hits(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  return points_[name].hits;
}

int64_t HoldPoints::pass_gate(const char* name) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = points_.find(name);
  if (found == points_.end()) return 0;
  ++found->second.hits;
  const int64_t delay_us = found->second.delay_us;
  if (found->second.closed) {
    // Looked up again on every wake: clear() may have rewritten the entry.
    opened_.wait_for(lock, kGateLimit, [&] { return !points_[name].closed; });
  }
  return delay_us;
}

void HoldPoints::pass_armed(const char* name) {
  const int64_t delay_us = pass_gate(name);
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
}

}  // namespace jaxserve
