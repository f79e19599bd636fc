// CUDA graphs of decode and verify steps, made by capture and replayed with fixed addresses.
//
// A step of some sizes runs as it is the first time (libraries load and choose then, which a capture does not allow),
// is captured the second time, and from then on is one launch of that graph. Whatever it reads and writes stays where
// it was: weights and the KV pool are where JAX put them, everything else lies in one arena of ours. Should JAX have
// moved something (a pool made anew after a failure), the graph is captured again, and that is counted.
//
// All steps share the arena and cuBLAS's workspace: they must be launched on one stream.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/live_objects.h"
#include "cuda/decoder/decoder.h"

namespace jaxserve::cuda::decoder {

struct Counts {
  uint64_t uncaptured = 0;  // steps that ran as they are
  uint64_t captured = 0;    // graphs made
  uint64_t moved = 0;       // of those, made because an address had changed
  uint64_t replayed = 0;    // launches of graphs
  uint64_t nodes = 0;       // of the newest graph
  uint64_t capture_ns = 0;  // spent on capture and instantiation
};

class CapturedSteps {
 public:
  // `libraries`: where cuBLAS may be, see Gemm. Raises NativeError.
  explicit CapturedSteps(const std::vector<std::string>& libraries);
  // The caller makes sure that no step is running.
  ~CapturedSteps();
  CapturedSteps(const CapturedSteps&) = delete;
  CapturedSteps& operator=(const CapturedSteps&) = delete;

  // Makes room for a step of these sizes. Waits for the device if the arena has to grow.
  void reserve(const Sizes& sizes);

  // What a step reads from elsewhere, and where its results are wanted.
  struct Ends {
    Buffers inputs;   // those that are inputs; the others are null
    Buffers results;  // logits, keys, values and features, likewise
  };

  // Runs a step: copies its inputs into the arena, launches it, copies its results out. Raises NativeError if there is
  // no room (see reserve), or if CUDA or cuBLAS refuses.
  void run(const Sizes& sizes, const Weights& weights, const uint16_t* pool, const Ends& ends, cudaStream_t stream);

  // Replays the graph of steps of this many sequences and tokens (of several the one launched last) and blocks until
  // that is done; returns milliseconds per replay, 0 if there is no such graph. Only the arena is written.
  double time_replays(int batch, int queries, int repeats);

  Counts counts();
  std::size_t arena_bytes();

 private:
  struct Step {
    std::vector<const void*> addresses;
    bool has_run = false;
    uint64_t launched_at = 0;  // counts_.replayed at the newest launch
    cudaGraphExec_t graph = nullptr;
  };

  void forget(Step& step);
  void capture(Step& step, const std::function<void(cudaStream_t)>& enqueue);

  LiveObject<ObjectKind::kCapturedSteps> live_;
  Gemm gemm_;
  std::mutex mutex_;
  std::byte* arena_ = nullptr;  // guarded by mutex_, as everything below
  std::size_t arena_bytes_ = 0;
  cudaStream_t capture_stream_ = nullptr;
  cudaStream_t newest_stream_ = nullptr;
  std::map<std::vector<int64_t>, Step> steps_;
  Counts counts_;
};

// Registers captured steps and returns their number (never 0, never reused), by which programs name them.
uint64_t open_captured_steps(std::shared_ptr<CapturedSteps> steps);
void close_captured_steps(uint64_t number);
// Null for closed ones.
std::shared_ptr<CapturedSteps> find_captured_steps(uint64_t number);

}  // namespace jaxserve::cuda::decoder
