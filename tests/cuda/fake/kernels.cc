// The kernels of csrc/cuda as operations of fake streams.
#include "cuda/kernels.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "runtime.h"

namespace jaxserve::cuda {

void launch_scatter_rows(const ScatterRows& scatter, cudaStream_t stream) {
  fake::of(stream).enqueue([s = scatter] {
    for (int64_t i = 0; i < s.num_rows; ++i) {
      std::memcpy(s.data + s.rows[i] * s.num_columns + s.first_column, s.values + i * s.num_values, s.num_values * 4);
    }
  });
}

void launch_gather_rows(const GatherRows& gather, cudaStream_t stream) {
  fake::of(stream).enqueue([g = gather] {
    for (int32_t b = 0; b < g.num_row_ids; ++b) {
      const int32_t wanted = g.row_ids[b];
      if (g.row_ids_out != nullptr) g.row_ids_out[b] = wanted;
      for (int32_t t = 0; t < g.num_tables; ++t) {
        const GatherTable& table = g.tables[t];
        const int32_t row = std::clamp(wanted, 0, table.num_rows - 1);
        if (row != wanted && g.row_error != nullptr) {
          *g.row_error = (static_cast<unsigned long long>(b + 1) << 32) | static_cast<uint32_t>(wanted);
        }
        std::memcpy(table.target + b * table.width, table.source + static_cast<int64_t>(row) * table.num_columns,
                    table.width * 4);
      }
    }
  });
}

void launch_spin(int64_t microseconds, cudaStream_t stream) {
  fake::of(stream).enqueue([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

}  // namespace jaxserve::cuda
