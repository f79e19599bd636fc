#include "common/journal.h"

#include <chrono>

namespace jaxserve {
namespace {

constexpr uint64_t kHostThread = uint64_t{1} << 56;

// Small numbers for host threads, in the order in which they first appear.
uint64_t host_actor() {
  static std::atomic<uint64_t> newest{0};
  static thread_local const uint64_t number = newest.fetch_add(1, std::memory_order_relaxed) + 1;
  return kHostThread | number;
}

}  // namespace

Journal& Journal::instance() {
  static Journal* journal = new Journal();  // never destroyed: handlers may still run at process exit
  return *journal;
}

uint64_t& Journal::current_actor() {
  static thread_local uint64_t actor = 0;
  return actor;
}

uint32_t& Journal::current_origin() {
  static thread_local uint32_t origin = 0;
  return origin;
}

void Journal::start(std::size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_.clear();
  capacity_ = capacity;
  num_dropped_ = 0;
  on_.store(true, std::memory_order_relaxed);
}

void Journal::stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  on_.store(false, std::memory_order_relaxed);
}

uint64_t Journal::drain(std::vector<JournalEntry>& entries) {
  entries.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  entries.swap(entries_);
  const uint64_t dropped = num_dropped_;
  num_dropped_ = 0;
  return dropped;
}

uint64_t Journal::named_id(const std::string& name) {
  const uint64_t id = next_id();
  std::lock_guard<std::mutex> lock(mutex_);
  names_[id] = name;
  return id;
}

std::map<uint64_t, std::string> Journal::names() {
  std::lock_guard<std::mutex> lock(mutex_);
  return names_;
}

uint32_t Journal::intern(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (text.empty()) return 0;
  const auto [found, fresh] = indices_.try_emplace(text, static_cast<uint32_t>(strings_.size()));
  if (fresh) strings_.push_back(text);
  return found->second;
}

std::vector<std::string> Journal::strings() {
  std::lock_guard<std::mutex> lock(mutex_);
  return strings_;
}

void Journal::append_on(JournalKind kind, uint64_t subject, uint64_t a, uint64_t b, uint32_t origin) {
  const uint64_t acting = current_actor();
  const uint64_t actor = acting != 0 ? acting : host_actor();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_on()) return;
  if (entries_.size() >= capacity_) {
    ++num_dropped_;
    return;
  }
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  entries_.push_back({std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), static_cast<uint32_t>(kind),
                      origin, actor, subject, a, b});
}

void Journal::add_buffer(const void* data, uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_[data] = id;
}

void Journal::remove_buffer(const void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  buffers_.erase(data);
}

uint64_t Journal::buffer_at(const void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = buffers_.find(data);
  return found == buffers_.end() ? 0 : found->second;
}

}  // namespace jaxserve
