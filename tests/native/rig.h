// What the tests of both twins share: rings, buffers and a channel as an engine has them, and executions as XLA runs
// them. Compiled once per twin, like csrc/module.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "call_frame.h"
#include "check.h"
#include "common/current_launch.h"
#include "common/faults.h"
#include "common/hold_points.h"
#include "common/journal.h"
#include "common/launch_ticket.h"
#include "common/live_objects.h"

#ifdef JAXSERVE_CUDA
#include "cuda/twin.h"
#include "runtime.h"
namespace twin = jaxserve::cuda;
#else
#include "cpu/twin.h"
namespace twin = jaxserve::cpu;
#endif

namespace native_tests {

using jaxserve::Faults;
using jaxserve::HoldPoints;
using jaxserve::InjectedFault;
using jaxserve::LaunchTicket;
using jaxserve::NativeError;
using jaxserve::WaitTimeout;

constexpr double kLong = 60.0;  // seconds; far more than any of this takes, sanitized

using RingPointer = std::shared_ptr<twin::EventRing>;
using BufferPointer = std::shared_ptr<twin::SharedBuffer>;

inline RingPointer make_ring(const std::string& name, int num_slots = 8) {
  return std::make_shared<twin::EventRing>(name, num_slots);
}
inline BufferPointer make_buffer(int64_t num_rows, int64_t num_columns) {
  return std::make_shared<twin::SharedBuffer>(num_rows, num_columns, false);
}
// Row-major. Read only when nobody writes: device memory is host memory on the fake device.
inline const int32_t* rows_of(const BufferPointer& buffer) { return reinterpret_cast<const int32_t*>(buffer->data()); }

// Writes the same value to every column of the rows.
void write(twin::Stream& stream, const BufferPointer& buffer, const std::vector<int32_t>& rows, int32_t value);

// The rings of one runner, under a channel number.
struct Fences {
  explicit Fences(double timeout_s = kLong, int num_slots = 8);
  ~Fences() { twin::close_channel(number); }

  RingPointer write_done, read_done, step_done;
  uint64_t number;
};

// XLA's side of one runner: its compute stream, and the handlers of a program.
class Executor {
 public:
  Executor();
  ~Executor();
  // Copies `row_ids.size()` rows of the buffer into `copy`. Returns the error's message.
  std::string snapshot(const LaunchTicket& ticket, const BufferPointer& buffer, const std::vector<int32_t>& row_ids,
                       std::vector<int32_t>& copy);
  std::string record_end(const LaunchTicket& ticket);
  void sync();

 private:
  void* stream_ = nullptr;
};

// Fails the test if an object is alive that was not when this was made, or if a test leaves something armed.
class NothingLeft {
 public:
  NothingLeft();
  void check();

 private:
  std::vector<int64_t> before_;
};

// Runs bodies beside each other; the first exception is raised again by join().
class Threads {
 public:
  ~Threads() { wait(); }
  void start(std::function<void()> body);
  void join();

 private:
  void wait();

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::exception_ptr failure_;  // guarded by mutex_
};

}  // namespace native_tests
