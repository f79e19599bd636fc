// XLA FFI call frames without XLA: what a program hands to a handler, and the few services the handlers ask for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace native_tests {

// Stands for XLA's pool. The destructor runs what is queued, then joins.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  void schedule(std::function<void()> task);
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  std::vector<std::thread> threads_;
};

struct Array {
  void* data;
  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
};

using Attribute = std::variant<int64_t, float, std::string>;

// Calls a handler as XLA does. Returns its error's message; empty when it succeeded.
// `pool` and `stream`: what the handler gets when it asks; null where it does not.
std::string call(XLA_FFI_Handler* handler, std::vector<Array> operands, std::vector<Array> results,
                 const std::map<std::string, Attribute>& attributes = {}, ThreadPool* pool = nullptr,
                 void* stream = nullptr);

}  // namespace native_tests
