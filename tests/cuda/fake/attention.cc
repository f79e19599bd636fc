// The paged attention kernel, its real body, as an operation of fake streams.
#include <memory>

#include "cuda/kernels.h"
#include "cuda/paged_attention_kernel.h"
#include "emulated_ops.h"
#include "runtime.h"

namespace jaxserve::cuda {
namespace {

template <int kDim>
void run(const PagedAttention& p) {
  const int num_rows = p.queries * (p.heads / p.kv_heads);
  auto tile = std::make_unique<AttentionTile<kDim>>();
  for (int sequence = 0; sequence < p.batch * p.kv_heads; ++sequence) {
    for (int number = 0; number < (num_rows + kTileRows - 1) / kTileRows; ++number) {
      for (int split = 0; split < p.splits; ++split) {
        fake::run_block(kAttentionThreads, [&](int thread) {
          attend_split<fake::EmulatedOps, kDim>(p, *tile, split, number, sequence, thread);
        });
      }
    }
  }
  if (p.splits == 1) return;
  for (int row = 0; row < p.batch * p.queries * p.heads; ++row) {
    fake::run_block(kMergeThreads, [&](int thread) { merge_splits<fake::EmulatedOps>(p, row, thread); });
  }
}

}  // namespace

void launch_paged_attention(const PagedAttention& attention, cudaStream_t stream) {
  fake::of(stream).enqueue([p = attention] {
    switch (p.dim) {
      case 64: return run<64>(p);
      case 96: return run<96>(p);
      case 128: return run<128>(p);
      case 192: return run<192>(p);
      case 256: return run<256>(p);
      default: break;
    }
  });
}

}  // namespace jaxserve::cuda
