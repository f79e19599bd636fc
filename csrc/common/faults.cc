#include "common/faults.h"

namespace jaxserve {

Faults& Faults::instance() {
  static Faults* faults = new Faults();  // never destroyed: handlers may still pass at process exit
  return *faults;
}

void Faults::fail_nth(const std::string& kind, int64_t n, int64_t times) {
  JAXSERVE_CHECK(n >= 0 && times >= 1, "fail_nth",
                 "wanted n >= 0 and times >= 1, got " + std::to_string(n) + " and " + std::to_string(times));
  std::lock_guard<std::mutex> lock(mutex_);
  plans_[kind] = Plan{n, times, 0, 0};
  armed_.store(true, std::memory_order_relaxed);
}

void Faults::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  armed_.store(false, std::memory_order_relaxed);
  plans_.clear();
}

int64_t Faults::passes(const std::string& kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = plans_.find(kind);
  return found == plans_.end() ? 0 : found->second.passes;
}

int64_t Faults::failures(const std::string& kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = plans_.find(kind);
  return found == plans_.end() ? 0 : found->second.failures;
}

void Faults::pass_armed(const char* kind, const char* place) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = plans_.find(kind);
  if (found == plans_.end()) return;
  Plan& plan = found->second;
  const int64_t number = ++plan.passes;
  if (plan.first == 0 || number < plan.first || number >= plan.first + plan.times) return;
  ++plan.failures;
  throw InjectedFault(located(__FILE__, __LINE__, place,
                              "injected fault: " + std::string(kind) + " " + std::to_string(number)));
}

}  // namespace jaxserve
