#include "cuda/decoder/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/decoder/kernels.h"
#include "cuda/kernels.h"

namespace jaxserve::cuda::decoder {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kOutput = -1;  // among points

// Hands out one buffer after the other; with a null base it only counts.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <typename Element>
  void place(Element*& target, int64_t elements) {
    target = base_ == nullptr ? nullptr : reinterpret_cast<Element*>(base_ + bytes_);
    bytes_ += (static_cast<std::size_t>(elements) * sizeof(Element) + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

PagedAttention attention_of(const Sizes& s, const uint16_t* pool, const Buffers& b, int layer) {
  const int64_t kind_stride = int64_t{1} * s.kv_heads * s.num_pages * s.page_size * s.dim;
  PagedAttention p{};
  p.q = b.q;
  p.new_keys = b.keys + layer * s.kv_elements();
  p.new_values = b.values + layer * s.kv_elements();
  p.keys = pool + layer * 2 * kind_stride;
  p.values = p.keys + kind_stride;
  p.tables = b.tables;
  p.lengths = b.lengths;
  p.seen = s.is_tree ? b.seen : nullptr;
  p.depths = s.is_tree ? b.depths : nullptr;
  p.out = b.attended;
  p.partial = b.partial;
  p.batch = s.batch;
  p.queries = s.queries;
  p.heads = s.heads;
  p.kv_heads = s.kv_heads;
  p.dim = s.dim;
  p.num_pages = s.num_pages;
  p.page_size = s.page_size;
  p.table_width = s.table_width;
  p.splits = s.splits;
  p.window = s.windows[layer];
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
  return p;
}

void observe(const Sizes& s, const Buffers& b, int point, const uint16_t* states, cudaStream_t stream) {
  const int stride = s.hidden * static_cast<int>(s.points.size());
  for (std::size_t i = 0; i < s.points.size(); ++i) {
    if (s.points[i] != point) continue;
    launch_copy_columns({states, b.features, s.rows(), s.hidden, stride, static_cast<int>(i) * s.hidden}, stream);
  }
}

}  // namespace

std::vector<int64_t> Sizes::identity() const {
  int32_t eps_bits;
  std::memcpy(&eps_bits, &eps, sizeof(eps_bits));
  std::vector<int64_t> found = {batch, queries, vocab,     hidden, inner,   heads,    kv_heads, dim, table_width,
                                num_pages, page_size, splits, is_tree, eps_bits, layers()};
  found.insert(found.end(), windows.begin(), windows.end());
  found.insert(found.end(), points.begin(), points.end());
  return found;
}

std::size_t lay_out(const Sizes& s, std::byte* base, Buffers* buffers) {
  const int64_t rows = s.rows();
  const int qkv = (s.heads + 2 * s.kv_heads) * s.dim;
  Layout layout(base);
  Buffers b{};
  layout.place(b.tokens, rows);
  layout.place(b.cosines, rows * s.dim / 2);
  layout.place(b.sines, rows * s.dim / 2);
  layout.place(b.tables, int64_t{1} * s.batch * s.table_width);
  layout.place(b.lengths, s.batch);
  if (s.is_tree) {
    layout.place(b.seen, rows * s.queries);
    layout.place(b.depths, rows);
  }
  layout.place(b.logits, rows * s.vocab);
  layout.place(b.keys, s.layers() * s.kv_elements());
  layout.place(b.values, s.layers() * s.kv_elements());
  if (!s.points.empty()) layout.place(b.features, rows * s.hidden * static_cast<int64_t>(s.points.size()));
  layout.place(b.x, rows * s.hidden);
  layout.place(b.normed, rows * s.hidden);
  layout.place(b.product, rows * std::max({qkv, 2 * s.inner, s.hidden}));
  layout.place(b.q, rows * s.heads * s.dim);
  layout.place(b.attended, rows * s.heads * s.dim);
  layout.place(b.activated, rows * s.inner);
  layout.place(b.partial, s.splits > 1 ? rows * s.heads * s.splits * (s.dim + 2) : 1);
  if (buffers != nullptr) *buffers = b;
  return layout.bytes();
}

void enqueue_step(const Sizes& s, const Weights& w, const uint16_t* pool, const Buffers& b, Gemm& gemm,
                  cudaStream_t stream) {
  const int rows = s.rows();
  const int attended = s.heads * s.dim, qkv = attended + 2 * s.kv_heads * s.dim;
  launch_embed_rows({b.tokens, w.embedding, b.x, rows, s.vocab, s.hidden}, stream);
  const uint16_t* delta = nullptr;  // what the layer before adds to the residual stream
  const uint16_t* delta_bias = nullptr;
  const auto norm = [&](int number) {
    const uint16_t* weight = w.norms + int64_t{1} * number * s.hidden;
    launch_add_norm({b.x, delta, delta_bias, weight, b.normed, rows, s.hidden, s.eps}, stream);
  };
  for (int i = 0; i < s.layers(); ++i) {
    const LayerWeights& layer = w.layers[i];
    norm(2 * i);
    observe(s, b, i, b.x, stream);
    gemm.multiply(b.normed, layer.qkv, b.product, false, rows, s.hidden, qkv, stream);
    const uint16_t* head_norms = w.head_norms == nullptr ? nullptr : w.head_norms + int64_t{2} * i * s.dim;
    uint16_t* keys = b.keys + i * s.kv_elements();
    uint16_t* values = b.values + i * s.kv_elements();
    launch_rotate_heads({b.product, layer.qkv_bias, head_norms, b.cosines, b.sines, b.q, keys, values, rows, s.heads,
                         s.kv_heads, s.dim, s.eps},
                        stream);
    launch_paged_attention(attention_of(s, pool, b, i), stream);
    gemm.multiply(b.attended, layer.o, b.product, false, rows, attended, s.hidden, stream);
    delta = b.product, delta_bias = layer.o_bias;
    norm(2 * i + 1);
    gemm.multiply(b.normed, layer.gate_up, b.product, false, rows, s.hidden, 2 * s.inner, stream);
    launch_gate_up({b.product, layer.gate_up_bias, b.activated, rows, s.inner}, stream);
    gemm.multiply(b.activated, layer.down, b.product, false, rows, s.inner, s.hidden, stream);
    delta = b.product, delta_bias = layer.down_bias;
  }
  norm(2 * s.layers());
  observe(s, b, s.layers(), b.x, stream);
  observe(s, b, kOutput, b.normed, stream);
  gemm.multiply(b.normed, w.lm_head, b.logits, true, rows, s.hidden, s.vocab, stream);
}

}  // namespace jaxserve::cuda::decoder
