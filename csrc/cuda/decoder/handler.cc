// XLA FFI handler of captured decode and verify steps. It launches one graph (see captured_steps.h) and never blocks.
// Not command-buffer compatible: what it launches is a graph already.
#include <cstdint>
#include <exception>
#include <string>

#include "common/faults.h"
#include "cuda/check_cuda.h"
#include "cuda/decoder/captured_steps.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve::cuda::decoder {
namespace {

constexpr const char* kName = "jaxserve_captured_step";
constexpr std::size_t kFirstWeights = 12;  // operands ahead of the layers' weights
constexpr std::size_t kPerLayer = 8;

void require(bool condition, const std::string& reason) { JAXSERVE_CHECK(condition, kName, reason); }

// An operand or a result with the size that the others imply.
struct Array {
  void* data;
  ffi::DataType type;
  int64_t elements;
  std::vector<int64_t> dims;

  template <typename Buffer>
  static Array of(const Buffer& buffer) {
    const auto dims = buffer.dimensions();
    return {buffer.untyped_data(), buffer.element_type(), static_cast<int64_t>(buffer.element_count()),
            std::vector<int64_t>(dims.begin(), dims.end())};
  }

  template <typename Element>
  Element* as(ffi::DataType wanted, int64_t wanted_elements, const char* name) const {
    require(type == wanted, std::string(name) + " has another element type");
    require(elements == wanted_elements, std::string(name) + ": wanted " + std::to_string(wanted_elements) +
                                             " elements, got " + std::to_string(elements));
    return static_cast<Element*>(data);
  }

  // Null when it is empty.
  const uint16_t* optional_bf16(int64_t wanted_elements, const char* name) const {
    return elements == 0 ? nullptr : as<const uint16_t>(ffi::DataType::BF16, wanted_elements, name);
  }
};

struct Attributes {
  int64_t steps, kv_heads, dim, splits;
  float eps;
  ffi::Span<const int64_t> windows, points;
};

void run(cudaStream_t stream, ffi::RemainingArgs& operands, ffi::RemainingRets& results, const Attributes& attributes) {
  const auto operand = [&](std::size_t i) {
    auto found = operands.get<ffi::AnyBuffer>(i);
    require(!found.has_error(), "operand " + std::to_string(i) + " is missing");
    return Array::of(*found);
  };
  const auto result = [&](std::size_t i) {
    auto found = results.get<ffi::AnyBuffer>(i);
    require(!found.has_error(), "result " + std::to_string(i) + " is missing");
    return Array::of(**found);
  };
  const auto steps = find_captured_steps(static_cast<uint64_t>(attributes.steps));
  require(steps != nullptr, "captured steps " + std::to_string(attributes.steps) + " are not open");

  const Array tokens = operand(0), tables = operand(3), seen = operand(5), pool = operand(7), embedding = operand(8);
  require(tokens.dims.size() == 2 && tables.dims.size() == 2 && pool.dims.size() == 6 && embedding.dims.size() == 2,
          "wanted tokens [B, Q], block tables [B, W], pool [layers, 2, kv heads, pages, page size, dim], embedding "
          "[vocab, hidden]");
  Sizes s{};
  s.batch = static_cast<int>(tokens.dims[0]);
  s.queries = static_cast<int>(tokens.dims[1]);
  s.vocab = static_cast<int>(embedding.dims[0]);
  s.hidden = static_cast<int>(embedding.dims[1]);
  s.kv_heads = static_cast<int>(attributes.kv_heads);
  s.dim = static_cast<int>(attributes.dim);
  s.table_width = static_cast<int>(tables.dims[1]);
  s.num_pages = static_cast<int>(pool.dims[3]);
  s.page_size = static_cast<int>(pool.dims[4]);
  s.splits = static_cast<int>(attributes.splits);
  s.is_tree = seen.elements != 0;
  s.eps = attributes.eps;
  s.windows.assign(attributes.windows.begin(), attributes.windows.end());
  s.points.assign(attributes.points.begin(), attributes.points.end());
  for (const int point : s.points) {
    require(point >= -1 && point <= s.layers(),
            "wanted points from -1 to " + std::to_string(s.layers()) + ", got " + std::to_string(point));
  }
  const auto layers = static_cast<std::size_t>(s.layers());
  require(layers > 0 && operands.size() == kFirstWeights + kPerLayer * layers,
          "wanted " + std::to_string(kPerLayer) + " weights for each of " + std::to_string(layers) + " layers, got " +
              std::to_string(operands.size()) + " operands");
  const Array first_o = operand(kFirstWeights + 1), first_down = operand(kFirstWeights + 3);
  require(first_o.dims.size() == 2 && first_down.dims.size() == 2 && s.dim > 0, "weights must be [out, in]");
  s.heads = static_cast<int>(first_o.dims[1]) / s.dim;
  s.inner = static_cast<int>(first_down.dims[1]);
  require(s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.dim % 2 == 0 && s.dim <= 256 && s.hidden % 8 == 0 &&
              s.inner % 8 == 0 && s.page_size % 16 == 0 && s.splits > 0,
          "wanted features that are multiples of 8, heads of up to 256 that are even, and pages that are multiples of 16");
  require(int64_t{1} * s.batch * s.kv_heads <= 65535 && s.rows() <= 65535,
          "wanted at most 65535 token rows, and pairs of sequence and KV head");
  require(pool.dims[0] == s.layers() && pool.dims[1] == 2 && pool.dims[2] == s.kv_heads && pool.dims[5] == s.dim,
          "the pool does not fit the model");

  const int64_t rows = s.rows(), qkv = int64_t{1} * (s.heads + 2 * s.kv_heads) * s.dim;
  const int64_t attended = int64_t{1} * s.heads * s.dim, hidden = s.hidden, inner = s.inner;
  CapturedSteps::Ends ends{};
  ends.inputs.tokens = tokens.as<int32_t>(ffi::DataType::S32, rows, "tokens");
  ends.inputs.cosines = operand(1).as<float>(ffi::DataType::F32, rows * s.dim / 2, "cosines");
  ends.inputs.sines = operand(2).as<float>(ffi::DataType::F32, rows * s.dim / 2, "sines");
  ends.inputs.tables = tables.as<int32_t>(ffi::DataType::S32, s.batch * tables.dims[1], "block tables");
  ends.inputs.lengths = operand(4).as<int32_t>(ffi::DataType::S32, s.batch, "lengths");
  if (s.is_tree) {
    ends.inputs.seen = seen.as<uint8_t>(ffi::DataType::U8, rows * s.queries, "seen");
    ends.inputs.depths = operand(6).as<int32_t>(ffi::DataType::S32, rows, "depths");
  }
  Weights w{};
  w.embedding = embedding.as<const uint16_t>(ffi::DataType::BF16, int64_t{1} * s.vocab * hidden, "embedding");
  w.norms = operand(9).as<const uint16_t>(ffi::DataType::BF16, (2 * s.layers() + 1) * hidden, "norms");
  w.head_norms = operand(10).optional_bf16(int64_t{2} * s.layers() * s.dim, "head norms");
  w.lm_head = operand(11).as<const uint16_t>(ffi::DataType::BF16, int64_t{1} * s.vocab * hidden, "LM head");
  for (std::size_t i = 0; i < layers; ++i) {
    const std::size_t at = kFirstWeights + kPerLayer * i;
    w.layers.push_back({operand(at).as<const uint16_t>(ffi::DataType::BF16, qkv * hidden, "qkv"),
                        operand(at + 1).as<const uint16_t>(ffi::DataType::BF16, hidden * attended, "o"),
                        operand(at + 2).as<const uint16_t>(ffi::DataType::BF16, 2 * inner * hidden, "gate and up"),
                        operand(at + 3).as<const uint16_t>(ffi::DataType::BF16, hidden * inner, "down"),
                        operand(at + 4).optional_bf16(qkv, "qkv bias"), operand(at + 5).optional_bf16(hidden, "o bias"),
                        operand(at + 6).optional_bf16(2 * inner, "gate and up bias"),
                        operand(at + 7).optional_bf16(hidden, "down bias")});
  }
  require(results.size() == (s.points.empty() ? 3u : 4u), "wanted logits, keys, values, and features if any");
  const int64_t kv = s.layers() * s.kv_elements();
  ends.results.logits = result(0).as<float>(ffi::DataType::F32, rows * s.vocab, "logits");
  ends.results.keys = result(1).as<uint16_t>(ffi::DataType::BF16, kv, "keys");
  ends.results.values = result(2).as<uint16_t>(ffi::DataType::BF16, kv, "values");
  if (!s.points.empty()) {
    const auto points = static_cast<int64_t>(s.points.size());
    ends.results.features = result(3).as<uint16_t>(ffi::DataType::BF16, rows * points * hidden, "features");
  }
  Faults::instance().pass("launch", kName);
  steps->run(s, w, pool.as<const uint16_t>(ffi::DataType::BF16, pool.elements, "pool"), ends, stream);
}

// No exception may cross XLA's C interface.
ffi::Error captured_step(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t steps,
                         int64_t kv_heads, int64_t dim, int64_t splits, float eps, ffi::Span<const int64_t> windows,
                         ffi::Span<const int64_t> points) {
  try {
    run(stream, operands, results, {steps, kv_heads, dim, splits, eps, windows, points});
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

// Operands: tokens s32[B, Q]; cosines, sines f32[B * Q, dim / 2]; block tables s32[B, W]; lengths s32[B];
// seen u8[B, Q, Q] and depths s32[B, Q], or empty: a chain; pool bf16[layers, 2, kv heads, pages, page size, dim];
// embedding, norms, head norms (or empty), LM head; and of each layer qkv, o, gate and up, down and their biases (or
// empty), see Weights.
// Results: logits f32[B * Q, vocab]; keys and values bf16[layers, B, Q, kv heads, dim]; features bf16[B * Q, points *
// hidden] if there are points.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cuda_captured_step, captured_step,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("steps")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("dim")
                                  .Attr<int64_t>("splits")
                                  .Attr<float>("eps")
                                  .Attr<ffi::Span<const int64_t>>("windows")
                                  .Attr<ffi::Span<const int64_t>>("points"));

}  // namespace jaxserve::cuda::decoder
