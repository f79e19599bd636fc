#include "cuda/decoder/captured_steps.h"

#include <chrono>

#include "common/faults.h"
#include "cuda/check_cuda.h"
#include "cuda/decoder/kernels.h"
#include "cuda/hold_stream.h"

namespace jaxserve::cuda::decoder {
namespace {

struct Registry {
  std::mutex mutex;
  uint64_t newest = 0;                                       // guarded by mutex
  std::map<uint64_t, std::shared_ptr<CapturedSteps>> opened;  // guarded by mutex
};

Registry& registry() {
  static Registry* instance = new Registry();  // never destroyed: executions may outlive static destruction
  return *instance;
}

std::vector<const void*> addresses_of(const Weights& w, const uint16_t* pool, const void* arena) {
  std::vector<const void*> found = {arena, pool, w.embedding, w.norms, w.head_norms, w.lm_head};
  for (const LayerWeights& layer : w.layers) {
    for (const uint16_t* each : {layer.qkv, layer.o, layer.gate_up, layer.down, layer.qkv_bias, layer.o_bias,
                                 layer.gate_up_bias, layer.down_bias}) {
      found.push_back(each);
    }
  }
  return found;
}

void copy_inputs(const Sizes& s, const Buffers& from, const Buffers& to, cudaStream_t stream) {
  CopyAreas copies{};
  const auto add = [&](const void* source, void* target, int64_t bytes) {
    copies.areas[copies.num_areas++] = {source, target, bytes};
  };
  const int64_t rows = s.rows();
  add(from.tokens, to.tokens, rows * 4);
  add(from.cosines, to.cosines, rows * s.dim / 2 * 4);
  add(from.sines, to.sines, rows * s.dim / 2 * 4);
  add(from.tables, to.tables, int64_t{4} * s.batch * s.table_width);
  add(from.lengths, to.lengths, int64_t{4} * s.batch);
  if (s.is_tree) {
    add(from.seen, to.seen, rows * s.queries);
    add(from.depths, to.depths, rows * 4);
  }
  launch_copy_areas(copies, stream);
}

void copy_results(const Sizes& s, const Buffers& from, const Buffers& to, cudaStream_t stream) {
  const auto copy = [&](const void* source, void* target, int64_t bytes) {
    const auto size = static_cast<std::size_t>(bytes);
    JAXSERVE_CUDA_CHECK(cudaMemcpyAsync(target, source, size, cudaMemcpyDeviceToDevice, stream));
  };
  copy(from.logits, to.logits, int64_t{4} * s.rows() * s.vocab);
  copy(from.keys, to.keys, 2 * s.layers() * s.kv_elements());
  copy(from.values, to.values, 2 * s.layers() * s.kv_elements());
  if (!s.points.empty()) {
    copy(from.features, to.features, int64_t{2} * s.rows() * s.hidden * static_cast<int64_t>(s.points.size()));
  }
}

}  // namespace

CapturedSteps::CapturedSteps(const std::vector<std::string>& libraries) : gemm_(libraries) {
  JAXSERVE_CUDA_CHECK(cudaStreamCreateWithFlags(&capture_stream_, cudaStreamNonBlocking));
}

CapturedSteps::~CapturedSteps() {
  for (auto& [identity, step] : steps_) {
    if (step.graph != nullptr) JAXSERVE_CUDA_REPORT(cudaGraphExecDestroy(step.graph));
  }
  JAXSERVE_CUDA_REPORT(cudaStreamDestroy(capture_stream_));
  if (arena_ != nullptr) JAXSERVE_CUDA_REPORT(cudaFree(arena_));
}

void CapturedSteps::reserve(const Sizes& sizes) {
  const std::size_t wanted = lay_out(sizes, nullptr, nullptr);
  std::lock_guard<std::mutex> lock(mutex_);
  if (wanted <= arena_bytes_) return;
  Faults::instance().pass("allocate", "CapturedSteps");
  void* memory = nullptr;
  JAXSERVE_CUDA_CHECK(cudaMalloc(&memory, wanted));
  std::byte* const old = arena_;
  arena_ = static_cast<std::byte*>(memory);
  arena_bytes_ = wanted;
  // Waits until no step uses it. Graphs that did are known by its address, and captured again.
  if (old != nullptr) JAXSERVE_CUDA_CHECK(cudaFree(old));
}

void CapturedSteps::forget(Step& step) {
  if (step.graph != nullptr) JAXSERVE_CUDA_CHECK(cudaGraphExecDestroy(step.graph));  // one in flight: when it ends
  step.graph = nullptr;
  step.has_run = false;
}

void CapturedSteps::capture(Step& step, const std::function<void(cudaStream_t)>& enqueue) {
  const auto begin = std::chrono::steady_clock::now();
  cudaGraph_t graph = nullptr;
  // Thread-local: what other threads do meanwhile (XLA allocates, say) does not spoil it.
  JAXSERVE_CUDA_CHECK(cudaStreamBeginCapture(capture_stream_, cudaStreamCaptureModeThreadLocal));
  try {
    enqueue(capture_stream_);
  } catch (...) {
    JAXSERVE_CUDA_REPORT(cudaStreamEndCapture(capture_stream_, &graph));
    if (graph != nullptr) JAXSERVE_CUDA_REPORT(cudaGraphDestroy(graph));
    throw;
  }
  JAXSERVE_CUDA_CHECK(cudaStreamEndCapture(capture_stream_, &graph));
  try {
    std::size_t nodes = 0;
    JAXSERVE_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    JAXSERVE_CUDA_CHECK(cudaGraphInstantiate(&step.graph, graph, 0));
    counts_.nodes = nodes;
  } catch (...) {
    step.graph = nullptr;
    JAXSERVE_CUDA_REPORT(cudaGraphDestroy(graph));
    throw;
  }
  JAXSERVE_CUDA_CHECK(cudaGraphDestroy(graph));
  ++counts_.captured;
  counts_.capture_ns += static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin).count());
}

void CapturedSteps::run(const Sizes& sizes, const Weights& weights, const uint16_t* pool, const Ends& ends,
                        cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t wanted = lay_out(sizes, nullptr, nullptr);
  JAXSERVE_CHECK(wanted <= arena_bytes_, "CapturedSteps.run",
                 "wanted " + std::to_string(wanted) + " bytes, reserved are " + std::to_string(arena_bytes_));
  Buffers buffers{};
  lay_out(sizes, arena_, &buffers);
  Step& step = steps_[sizes.identity()];
  std::vector<const void*> addresses = addresses_of(weights, pool, arena_);
  if (step.addresses != addresses) {
    if (step.graph != nullptr) ++counts_.moved;
    forget(step);
    step.addresses = std::move(addresses);
  }
  const auto enqueue = [&](cudaStream_t on) { enqueue_step(sizes, weights, pool, buffers, gemm_, on); };
  copy_inputs(sizes, ends.inputs, buffers, stream);
  hold_stream("replay.before", stream);
  if (!step.has_run) {
    enqueue(stream);
    step.has_run = true;
    ++counts_.uncaptured;
  } else {
    if (step.graph == nullptr) capture(step, enqueue);
    JAXSERVE_CUDA_CHECK(cudaGraphLaunch(step.graph, stream));
    newest_stream_ = stream;
    step.launched_at = ++counts_.replayed;
  }
  hold_stream("replay.after", stream);
  copy_results(sizes, buffers, ends.results, stream);
}

double CapturedSteps::time_replays(int batch, int queries, int repeats) {
  JAXSERVE_CHECK(repeats > 0, "time_replays", "wanted at least one, got " + std::to_string(repeats));
  std::lock_guard<std::mutex> lock(mutex_);
  const Step* found = nullptr;
  for (const auto& [identity, step] : steps_) {
    if (step.graph == nullptr || identity[0] != batch || identity[1] != queries) continue;
    if (found == nullptr || step.launched_at > found->launched_at) found = &step;
  }
  if (found == nullptr) return 0.0;
  cudaEvent_t begin = nullptr, end = nullptr;
  JAXSERVE_CUDA_CHECK(cudaEventCreateWithFlags(&begin, cudaEventDefault));
  float milliseconds = 0.0f;
  try {
    JAXSERVE_CUDA_CHECK(cudaEventCreateWithFlags(&end, cudaEventDefault));
    JAXSERVE_CUDA_CHECK(cudaEventRecord(begin, newest_stream_));
    for (int i = 0; i < repeats; ++i) JAXSERVE_CUDA_CHECK(cudaGraphLaunch(found->graph, newest_stream_));
    JAXSERVE_CUDA_CHECK(cudaEventRecord(end, newest_stream_));
    JAXSERVE_CUDA_CHECK(cudaEventSynchronize(end));
    JAXSERVE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  } catch (...) {
    JAXSERVE_CUDA_REPORT(cudaEventDestroy(begin));
    if (end != nullptr) JAXSERVE_CUDA_REPORT(cudaEventDestroy(end));
    throw;
  }
  JAXSERVE_CUDA_CHECK(cudaEventDestroy(begin));
  JAXSERVE_CUDA_CHECK(cudaEventDestroy(end));
  return milliseconds / repeats;
}

Counts CapturedSteps::counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

std::size_t CapturedSteps::arena_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return arena_bytes_;
}

uint64_t open_captured_steps(std::shared_ptr<CapturedSteps> steps) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().opened[++registry().newest] = std::move(steps);
  return registry().newest;
}

void close_captured_steps(uint64_t number) {
  std::shared_ptr<CapturedSteps> last;  // destroyed behind the lock
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().opened.find(number);
  if (found == registry().opened.end()) return;
  last = std::move(found->second);
  registry().opened.erase(found);
}

std::shared_ptr<CapturedSteps> find_captured_steps(uint64_t number) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().opened.find(number);
  return found == registry().opened.end() ? nullptr : found->second;
}

}  // namespace jaxserve::cuda::decoder
