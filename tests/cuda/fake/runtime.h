// A CUDA runtime without a device, for running the host side of csrc/cuda on any machine.
//
// What it keeps of CUDA is what the fences depend on: streams run in order beside the host; an event wait binds to the
// newest record already issued when it is called, or when its graph is launched; a record or wait of a captured stream
// needs the external flag, and no other may have it.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fake {

using Operation = std::function<void()>;

class Stream {
 public:
  Stream();
  ~Stream();
  // Runs the operation behind all earlier ones; under capture keeps it for every later replay instead.
  void enqueue(Operation operation);
  // Runs `issue(*this)` now; under capture at every replay.
  void issue(std::function<void(Stream&)> issue);
  void sync();
  bool is_done();

  bool capturing = false;
  std::vector<std::function<void(Stream&)>> captured;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> operations_;
  bool running_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

inline Stream& of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }

// Whether this call was told to fail, by fake_fail_next.
bool fails(const char* function);

// The stream that handlers get, as XLA's compute stream.
cudaStream_t compute_stream();

}  // namespace fake
