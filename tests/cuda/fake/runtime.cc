#include "runtime.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace fake {

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t issued = 0;
  uint64_t completed = 0;
  std::chrono::steady_clock::time_point completed_at;
};
using EventHandle = std::shared_ptr<Event>;  // queued operations keep a destroyed event alive, as CUDA does

EventHandle& of(cudaEvent_t event) { return *reinterpret_cast<EventHandle*>(event); }

using Graph = std::vector<std::function<void(Stream&)>>;
std::atomic<int> live_graphs{0};  // executable ones and others

std::mutex streams_mutex;
std::set<Stream*> streams;
std::mutex failure_mutex;
std::string failing_function;

bool fails(const char* function) {
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (failing_function != function) return false;
  failing_function.clear();
  return true;
}

Stream::Stream() : thread_([this] { run(); }) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(this);
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    streams.erase(this);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::enqueue(Operation operation) {
  issue([operation](Stream& stream) {
    {
      std::lock_guard<std::mutex> lock(stream.mutex_);
      stream.operations_.push_back(operation);
    }
    stream.changed_.notify_all();
  });
}

void Stream::issue(std::function<void(Stream&)> issue) {
  if (capturing) {
    captured.push_back(std::move(issue));
  } else {
    issue(*this);
  }
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !operations_.empty(); });
    if (operations_.empty()) return;
    Operation operation = std::move(operations_.front());
    operations_.pop_front();
    running_ = true;
    lock.unlock();
    operation();
    operation = nullptr;
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

void Stream::sync() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return operations_.empty() && !running_; });
}

bool Stream::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return operations_.empty() && !running_;
}

cudaStream_t compute_stream() {
  static Stream* stream = new Stream();
  return reinterpret_cast<cudaStream_t>(stream);
}

void record(const EventHandle& event, Stream& stream) {
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->issued;
  }
  stream.enqueue([event, number] {
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      event->completed = number;
      event->completed_at = std::chrono::steady_clock::now();
    }
    event->changed.notify_all();
  });
}

void wait(const EventHandle& event, Stream& stream) {
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = event->issued;  // the newest record already issued; none: nothing to wait for
  }
  stream.enqueue([event, number] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->completed >= number; });
  });
}

}  // namespace fake

#define FAKE(function)                               \
  do {                                               \
    if (fake::fails(function)) return cudaErrorUnknown; \
  } while (0)

extern "C" {

__attribute__((visibility("default"))) void fake_fail_next(const char* function) {
  std::lock_guard<std::mutex> lock(fake::failure_mutex);
  fake::failing_function = function;
}

__attribute__((visibility("default"))) void fake_begin_capture() {
  fake::of(fake::compute_stream()).captured.clear();
  fake::of(fake::compute_stream()).capturing = true;
}

__attribute__((visibility("default"))) void fake_end_capture() { fake::of(fake::compute_stream()).capturing = false; }

// Launches what was captured, on the compute stream.
__attribute__((visibility("default"))) void fake_replay() {
  fake::Stream& stream = fake::of(fake::compute_stream());
  for (const auto& issue : stream.captured) issue(stream);
}

__attribute__((visibility("default"))) void fake_compute_sync() { fake::of(fake::compute_stream()).sync(); }

__attribute__((visibility("default"))) int fake_compute_is_done() {
  return fake::of(fake::compute_stream()).is_done() ? 1 : 0;
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorUnknown ? "cudaErrorUnknown" : error == cudaSuccess ? "cudaSuccess" : "cudaErrorFake";
}
const char* cudaGetErrorString(cudaError_t) { return "the fake runtime refused"; }

cudaError_t cudaGetDevice(int* device) {
  FAKE("cudaGetDevice");
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  FAKE("cudaMalloc");
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*memory, 0xab, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  FAKE("cudaFree");
  std::lock_guard<std::mutex> lock(fake::streams_mutex);
  for (fake::Stream* stream : fake::streams) stream->sync();  // as CUDA does
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  FAKE("cudaMemset");
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  FAKE("cudaMemsetAsync");
  fake::of(stream).enqueue([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  FAKE("cudaHostAlloc");
  *memory = std::malloc(bytes);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  FAKE("cudaFreeHost");
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* memory, unsigned int) {
  FAKE("cudaHostGetDevicePointer");
  *on_device = memory;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  FAKE("cudaStreamCreateWithFlags");
  *stream = reinterpret_cast<cudaStream_t>(new fake::Stream());
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  FAKE("cudaStreamDestroy");
  delete &fake::of(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  FAKE("cudaStreamSynchronize");
  if (stream != nullptr) fake::of(stream).sync();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  FAKE("cudaStreamQuery");
  return fake::of(stream).is_done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FAKE("cudaStreamIsCapturing");
  *status = fake::of(stream).capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  FAKE("cudaMemcpyAsync");
  fake::of(stream).enqueue([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

// Graphs. What is captured is not run.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  FAKE("cudaStreamBeginCapture");
  if (fake::of(stream).capturing) return cudaErrorIllegalState;
  fake::of(stream).captured.clear();
  fake::of(stream).capturing = true;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!fake::of(stream).capturing) return cudaErrorIllegalState;
  fake::of(stream).capturing = false;
  FAKE("cudaStreamEndCapture");
  *graph = reinterpret_cast<cudaGraph_t>(new fake::Graph(std::move(fake::of(stream).captured)));
  ++fake::live_graphs;
  fake::of(stream).captured.clear();
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  FAKE("cudaGraphGetNodes");
  *count = reinterpret_cast<fake::Graph*>(graph)->size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  FAKE("cudaGraphInstantiate");
  *executable = reinterpret_cast<cudaGraphExec_t>(new fake::Graph(*reinterpret_cast<fake::Graph*>(graph)));
  ++fake::live_graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  FAKE("cudaGraphDestroy");
  delete reinterpret_cast<fake::Graph*>(graph);
  --fake::live_graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  FAKE("cudaGraphExecDestroy");
  delete reinterpret_cast<fake::Graph*>(executable);
  --fake::live_graphs;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  FAKE("cudaGraphLaunch");
  for (const auto& issue : *reinterpret_cast<fake::Graph*>(executable)) issue(fake::of(stream));
  return cudaSuccess;
}

__attribute__((visibility("default"))) int fake_live_graphs() { return fake::live_graphs.load(); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE("cudaEventSynchronize");
  std::unique_lock<std::mutex> lock(fake::of(event)->mutex);
  fake::of(event)->changed.wait(lock, [&] { return fake::of(event)->completed >= fake::of(event)->issued; });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  FAKE("cudaEventElapsedTime");
  const auto passed = fake::of(end)->completed_at - fake::of(begin)->completed_at;
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  FAKE("cudaEventCreateWithFlags");
  *event = reinterpret_cast<cudaEvent_t>(new fake::EventHandle(std::make_shared<fake::Event>()));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  FAKE("cudaEventDestroy");
  delete &fake::of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  FAKE("cudaEventRecordWithFlags");
  if ((flags == cudaEventRecordExternal) != fake::of(stream).capturing) return cudaErrorInvalidValue;
  fake::of(stream).issue([handle = fake::of(event)](fake::Stream& s) { fake::record(handle, s); });
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  FAKE("cudaEventRecord");
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  FAKE("cudaStreamWaitEvent");
  if ((flags == cudaEventWaitExternal) != fake::of(stream).capturing) return cudaErrorInvalidValue;
  fake::of(stream).issue([handle = fake::of(event)](fake::Stream& s) { fake::wait(handle, s); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  FAKE("cudaEventQuery");
  std::lock_guard<std::mutex> lock(fake::of(event)->mutex);
  return fake::of(event)->completed >= fake::of(event)->issued ? cudaSuccess : cudaErrorNotReady;
}

}  // extern "C"
