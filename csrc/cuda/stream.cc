#include "cuda/stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "common/faults.h"
#include "common/journal.h"
#include "cuda/check_cuda.h"
#include "cuda/hold_stream.h"
#include "cuda/kernels.h"

namespace jaxserve::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::microseconds(5);

}  // namespace

Stream::Stream(int num_staging_blocks, int64_t staging_block_bytes, double wait_timeout_s, bool staging_guarded,
               const std::string& name)
    : wait_timeout_s_(wait_timeout_s),
      staging_guarded_(staging_guarded),
      id_(Journal::instance().named_id(name)),
      staging_id_(Journal::instance().named_id(name + " staging")) {
  JAXSERVE_CHECK(num_staging_blocks >= 1 && staging_block_bytes >= 1, "Stream",
                 "wanted at least one staging block of at least one byte");
  staging_.resize(num_staging_blocks);
  try {
    Faults::instance().pass("allocate", "Stream");
    JAXSERVE_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (StagingBlock& block : staging_) {
      allocate_staging(block, staging_block_bytes);
      JAXSERVE_CUDA_CHECK(cudaEventCreateWithFlags(&block.read_done, cudaEventDisableTiming));
    }
  } catch (...) {
    release();  // no destructor runs for a half-made object
    throw;
  }
}

Stream::~Stream() {
  JAXSERVE_CUDA_REPORT(cudaStreamSynchronize(stream_));  // kernels may still read the staging blocks
  release();
}

void Stream::release() {
  for (StagingBlock& block : staging_) {
    if (block.read_done != nullptr) JAXSERVE_CUDA_REPORT(cudaEventDestroy(block.read_done));
    if (block.bytes != nullptr) JAXSERVE_CUDA_REPORT(cudaFreeHost(block.bytes));
  }
  if (stream_ != nullptr) JAXSERVE_CUDA_REPORT(cudaStreamDestroy(stream_));
}

void Stream::allocate_staging(StagingBlock& block, int64_t num_bytes) {
  if (block.bytes != nullptr) {
    JAXSERVE_CUDA_CHECK(cudaFreeHost(block.bytes));
    block.bytes = nullptr;
    block.num_bytes = 0;
  }
  Faults::instance().pass("allocate", "Stream");
  void* memory = nullptr;
  JAXSERVE_CUDA_CHECK(cudaHostAlloc(&memory, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  block.bytes = static_cast<std::byte*>(memory);
  void* on_device = nullptr;
  JAXSERVE_CUDA_CHECK(cudaHostGetDevicePointer(&on_device, memory, 0));
  block.on_device = static_cast<std::byte*>(on_device);
  block.num_bytes = num_bytes;
}

void Stream::wait_for_staging_locked(const StagingBlock& block) {
  const auto start = Clock::now();
  const auto deadline = start + std::chrono::duration<double>(wait_timeout_s_);
  // An event never recorded counts as done: a fresh block is free. Polled, to keep to the timeout.
  while (!JAXSERVE_CUDA_QUERY(cudaEventQuery(block.read_done))) {
    JAXSERVE_CHECK(Clock::now() < deadline, "Stream.write_rows",
                   "no staging block became free; the stream is stuck in a wait");
    std::this_thread::sleep_for(kPollInterval);
  }
  stats_.staging_wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

Stream::StagingBlock& Stream::acquire_staging_locked(int64_t num_bytes) {
  StagingBlock& block = staging_[next_staging_];
  // Even the unguarded mutant may not free memory that a kernel reads: that would fault instead of corrupting rows.
  const bool must_grow = block.num_bytes < num_bytes;
  if (staging_guarded_ || must_grow) wait_for_staging_locked(block);
  next_staging_ = (next_staging_ + 1) % staging_.size();
  if (must_grow) allocate_staging(block, num_bytes);
  return block;
}

// Positions in `rows` to be written, at most one for each row. On the device rows are written in no order.
std::vector<int64_t> Stream::last_of_each_row_locked(const SharedBuffer& buffer, const int32_t* rows,
                                                     int64_t num_rows) {
  row_last_write_.resize(std::max<std::size_t>(row_last_write_.size(), buffer.num_rows()), 0);
  ++num_writes_;
  std::vector<int64_t> positions;
  positions.reserve(num_rows);
  for (int64_t i = num_rows - 1; i >= 0; --i) {
    if (row_last_write_[rows[i]] == num_writes_) continue;
    row_last_write_[rows[i]] = num_writes_;
    positions.push_back(i);
  }
  return positions;
}

void Stream::write_rows(std::shared_ptr<SharedBuffer> buffer, const int32_t* rows, int64_t num_rows,
                        int64_t first_column, const void* values, int64_t num_values) {
  JAXSERVE_CHECK(first_column >= 0 && num_values >= 0 && first_column + num_values <= buffer->num_columns(),
                 "Stream.write_rows",
                 "columns " + std::to_string(first_column) + ".." + std::to_string(first_column + num_values) +
                     " are outside a buffer of " + std::to_string(buffer->num_columns()) + " columns");
  for (int64_t i = 0; i < num_rows; ++i) {
    JAXSERVE_CHECK(rows[i] >= 0 && rows[i] < buffer->num_rows(), "Stream.write_rows",
                   "row " + std::to_string(rows[i]) + " is outside a buffer of " + std::to_string(buffer->num_rows()) +
                       " rows");
  }
  if (num_rows == 0 || num_values == 0) return;

  std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<int64_t> positions = last_of_each_row_locked(*buffer, rows, num_rows);
  const int64_t num_staged = static_cast<int64_t>(positions.size());
  const int64_t row_bytes = num_values * static_cast<int64_t>(kElementBytes);
  const int64_t index_bytes = num_staged * static_cast<int64_t>(sizeof(int32_t));
  StagingBlock& block = acquire_staging_locked(index_bytes + num_staged * row_bytes);
  for (int64_t i = 0; i < num_staged; ++i) {
    std::memcpy(block.bytes + i * sizeof(int32_t), rows + positions[i], sizeof(int32_t));
    std::memcpy(block.bytes + index_bytes + i * row_bytes,
                static_cast<const std::byte*>(values) + positions[i] * row_bytes, row_bytes);
  }
  hold_stream("stream.before_copy", stream_);
  stats_.num_copies += 1;
  stats_.bytes_copied += num_staged * row_bytes;
  if (!error_.empty()) return;
  ScatterRows scatter{};
  scatter.rows = reinterpret_cast<const int32_t*>(block.on_device);
  scatter.values = reinterpret_cast<const uint32_t*>(block.on_device + index_bytes);
  scatter.data = reinterpret_cast<uint32_t*>(buffer->data());
  scatter.num_rows = num_staged;
  scatter.num_columns = buffer->num_columns();
  scatter.first_column = first_column;
  scatter.num_values = num_values;
  Faults::instance().pass("copy", "Stream.write_rows");
  launch_scatter_rows(scatter, stream_);
  try {
    JAXSERVE_CUDA_CHECK(cudaEventRecord(block.read_done, stream_));
  } catch (...) {
    JAXSERVE_CUDA_REPORT(cudaStreamSynchronize(stream_));  // nothing guards the block, so it must be free now
    throw;
  }
}

void Stream::wait(std::shared_ptr<EventRing> ring, uint64_t generation, const std::string& /*kind*/) {
  ring->announce_wait(generation);
  std::string failure;
  try {
    ring->stream_wait(generation, stream_, wait_timeout_s_, /*announced=*/true);
  } catch (const NativeError& error) {
    failure = error.what();
  }
  // Not held during the wait: another thread may ask error() or stats() meanwhile. Two threads must not issue at once.
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure.empty() && error_.empty()) error_ = failure;
  stats_.num_waits += 1;
}

void Stream::record(std::shared_ptr<EventRing> ring, uint64_t generation) {
  hold_stream("stream.before_record", stream_);
  if (error().empty()) {
    ring->record_on(generation, stream_);
  } else {
    ring->abandon(generation);
  }
}

void Stream::sync() {
  JAXSERVE_CUDA_CHECK(cudaStreamSynchronize(stream_));
  std::lock_guard<std::mutex> lock(mutex_);
  JAXSERVE_CHECK(error_.empty(), "Stream.sync", error_);
}

bool Stream::is_done() { return JAXSERVE_CUDA_QUERY(cudaStreamQuery(stream_)); }

std::string Stream::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Stream::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  error_.clear();
}

StreamStats Stream::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamStats stats = stats_;
  for (const StagingBlock& block : staging_) {
    stats.num_staging_in_use += JAXSERVE_CUDA_QUERY(cudaEventQuery(block.read_done)) ? 0 : 1;
  }
  return stats;
}

}  // namespace jaxserve::cuda
