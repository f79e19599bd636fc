// XLA FFI handler of paged attention. It only launches kernels, so a graph may hold it, and it never blocks.
#include <cstdint>
#include <exception>
#include <string>

#include "common/faults.h"
#include "cuda/check_cuda.h"
#include "cuda/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve::cuda {
namespace {

void require(bool condition, const std::string& reason) {
  JAXSERVE_CHECK(condition, "jaxserve_paged_attention_bf16", reason);
}

const uint16_t* bits(const ffi::Buffer<ffi::BF16>& buffer) {
  return static_cast<const uint16_t*>(buffer.untyped_data());
}

void attend(cudaStream_t stream, const ffi::Buffer<ffi::BF16>& q, const ffi::Buffer<ffi::BF16>& new_keys,
            const ffi::Buffer<ffi::BF16>& new_values, const ffi::Buffer<ffi::BF16>& pool,
            const ffi::Buffer<ffi::S32>& tables, const ffi::Buffer<ffi::S32>& lengths,
            const ffi::Buffer<ffi::U8>& seen, const ffi::Buffer<ffi::S32>& depths, const ffi::Buffer<ffi::F32>& sinks,
            ffi::Result<ffi::Buffer<ffi::BF16>>& out, ffi::Result<ffi::Buffer<ffi::F32>>& partial, int64_t layer,
            float scale, int64_t window) {
  const auto qd = q.dimensions(), kd = new_keys.dimensions(), pd = pool.dimensions(), td = tables.dimensions();
  require(qd.size() == 4 && kd.size() == 4, "queries and keys must be [batch, tokens, heads, dim]");
  require(new_values.element_count() == new_keys.element_count(), "keys and values must have one shape");
  require(pd.size() == 6, "the pool must be [layers, 2, kv heads, pages, page size, dim]");
  require(td.size() == 2 && td[0] == qd[0], "block tables must be [batch, pages per sequence]");
  require(static_cast<int64_t>(lengths.element_count()) == qd[0], "lengths must be [batch]");
  require(layer >= 0 && layer < pd[0] && pd[2] == kd[2] && pd[5] == qd[3] && kd[0] == qd[0] && kd[1] == qd[1] &&
              kd[3] == qd[3],
          "pool, keys and queries do not match");
  require(qd[2] % kd[2] == 0, "query heads must be a multiple of KV heads");
  require(pd[4] % 16 == 0, "wanted a page size that is a multiple of 16, got " + std::to_string(pd[4]));
  require(window >= 0, "the window must not be negative");
  // Sizes that the kernel counts in 32 bits, and the limit of the grid's third dimension.
  require(qd[0] * kd[2] <= 65535, "wanted at most 65535 pairs of sequence and KV head");
  require(td[1] * pd[4] < (int64_t{1} << 31) && pd[3] < (int64_t{1} << 31) && window < (int64_t{1} << 31) &&
              qd[0] * qd[1] * qd[2] < (int64_t{1} << 31),
          "a size is beyond 2^31 - 1");

  PagedAttention p{};
  p.batch = static_cast<int>(qd[0]);
  p.queries = static_cast<int>(qd[1]);
  p.heads = static_cast<int>(qd[2]);
  p.dim = static_cast<int>(qd[3]);
  p.kv_heads = static_cast<int>(kd[2]);
  p.num_pages = static_cast<int>(pd[3]);
  p.page_size = static_cast<int>(pd[4]);
  p.table_width = static_cast<int>(td[1]);
  p.q = bits(q);
  p.new_keys = bits(new_keys);
  p.new_values = bits(new_values);
  const int64_t kind_stride = pd[2] * pd[3] * pd[4] * pd[5];
  p.keys = bits(pool) + layer * 2 * kind_stride;
  p.values = p.keys + kind_stride;
  p.tables = tables.typed_data();
  p.lengths = lengths.typed_data();
  p.scale = scale;
  p.window = static_cast<int>(window);
  p.out = static_cast<uint16_t*>(out->untyped_data());
  p.partial = partial->typed_data();
  const auto rows = partial->dimensions();
  const int64_t out_rows = qd[0] * qd[1] * qd[2];
  require(rows.size() == 3 && rows[1] >= 1 && rows[1] <= 65535, "partial results must be [rows, splits, dim + 2]");
  require(rows[1] == 1 || (rows[0] == out_rows && rows[2] == qd[3] + 2), "partial results have the wrong size");
  p.splits = static_cast<int>(rows[1]);
  if (seen.element_count() != 0) {
    require(static_cast<int64_t>(seen.element_count()) == qd[0] * qd[1] * qd[1] &&
                static_cast<int64_t>(depths.element_count()) == qd[0] * qd[1],
            "a tree needs a mask [batch, tokens, tokens] and depths [batch, tokens]");
    p.seen = seen.typed_data();
    p.depths = depths.typed_data();
  }
  if (sinks.element_count() != 0) {
    require(static_cast<int64_t>(sinks.element_count()) == qd[2], "sinks must be one per query head");
    p.sinks = sinks.typed_data();
  }
  Faults::instance().pass("launch", "jaxserve_paged_attention_bf16");
  launch_paged_attention(p, stream);
}

// No exception may cross XLA's C interface.
ffi::Error paged_attention(cudaStream_t stream, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::BF16> new_keys,
                           ffi::Buffer<ffi::BF16> new_values, ffi::Buffer<ffi::BF16> pool,
                           ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::U8> seen,
                           ffi::Buffer<ffi::S32> depths, ffi::Buffer<ffi::F32> sinks,
                           ffi::Result<ffi::Buffer<ffi::BF16>> out, ffi::Result<ffi::Buffer<ffi::F32>> partial,
                           int64_t layer, float scale, int64_t window) {
  try {
    attend(stream, q, new_keys, new_values, pool, tables, lengths, seen, depths, sinks, out, partial, layer, scale,
           window);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cuda_paged_attention_bf16, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // q [batch, tokens, heads, dim]
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // new keys [batch, tokens, kv heads, dim]
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // new values, likewise
                                  .Arg<ffi::Buffer<ffi::BF16>>()  // pool [layers, 2, kv heads, pages, page size, dim]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // block tables [batch, pages per sequence]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // context lengths [batch]
                                  .Arg<ffi::Buffer<ffi::U8>>()    // seen [batch, tokens, tokens], or empty: a chain
                                  .Arg<ffi::Buffer<ffi::S32>>()   // depths [batch, tokens], or empty
                                  .Arg<ffi::Buffer<ffi::F32>>()   // sinks [heads], or empty
                                  .Ret<ffi::Buffer<ffi::BF16>>()  // out, as q
                                  .Ret<ffi::Buffer<ffi::F32>>()   // [rows of out, splits, dim + 2]; one split: unused
                                  .Attr<int64_t>("layer")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxserve::cuda
