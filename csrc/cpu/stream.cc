#include "cpu/stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "common/faults.h"
#include "common/hold_points.h"

namespace jaxserve::cpu {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

Journal& journal() { return Journal::instance(); }

}  // namespace

Stream::Stream(int num_staging_blocks, int64_t staging_block_bytes, double wait_timeout_s, bool staging_guarded,
               const std::string& name)
    : wait_timeout_s_(wait_timeout_s),
      staging_guarded_(staging_guarded),
      id_(journal().named_id(name)),
      staging_id_(journal().named_id(name + " staging")) {
  JAXSERVE_CHECK(num_staging_blocks >= 1 && staging_block_bytes >= 1, "Stream",
                 "wanted at least one staging block of at least one byte");
  staging_.resize(num_staging_blocks);
  for (StagingBlock& block : staging_) {
    Faults::instance().pass("allocate", "Stream");
    block.bytes.resize(staging_block_bytes);
  }
  Faults::instance().pass("allocate", "Stream");
  thread_ = std::thread([this] { run(); });
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_all();
  thread_.join();
}

void Stream::enqueue(StreamOperation type, std::function<void()> run) {
  Faults::instance().pass("allocate", "Stream.enqueue");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    journal().append(JournalKind::kEnqueue, id_, ++num_enqueued_, static_cast<uint64_t>(type));
    operations_.push_back({type, num_enqueued_, Journal::current_origin(), std::move(run)});
  }
  work_available_.notify_one();
}

void Stream::run() {
  Journal::current_actor() = Journal::stream_actor(id_);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_available_.wait(lock, [&] { return stopping_ || !operations_.empty(); });
    if (operations_.empty()) return;
    Operation operation = std::move(operations_.front());
    operations_.pop_front();
    running_operation_ = true;
    lock.unlock();
    Journal::current_origin() = operation.origin;  // everything it does, it does for whoever enqueued it
    const auto type = static_cast<uint64_t>(operation.type);
    journal().append(JournalKind::kBeginOperation, id_, operation.number, type);
    std::string failure;
    try {
      operation.run();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    operation.run = nullptr;  // drop references (rings, buffers) before anyone is told that we are idle
    lock.lock();
    journal().append(JournalKind::kEndOperation, id_, operation.number, type);
    num_finished_ = operation.number;
    if (!failure.empty() && error_.empty()) error_ = failure;
    running_operation_ = false;
    work_finished_.notify_all();
  }
}

int Stream::acquire_staging(int64_t bytes) {
  std::unique_lock<std::mutex> lock(mutex_);
  const int index = next_staging_;
  next_staging_ = (next_staging_ + 1) % static_cast<int>(staging_.size());
  StagingBlock& block = staging_[index];
  if (staging_guarded_ && block.in_use) {
    const auto start = Clock::now();
    const bool freed = work_finished_.wait_for(lock, std::chrono::duration<double>(wait_timeout_s_),
                                               [&] { return !block.in_use; });
    stats_.staging_wait_ns += nanoseconds_since(start);
    JAXSERVE_CHECK(freed, "Stream.write_rows", "no staging block became free; the stream is stuck in a wait");
  }
  if (static_cast<int64_t>(block.bytes.size()) < bytes) {
    Faults::instance().pass("allocate", "Stream.write_rows");
    block.bytes.resize(bytes);
  }
  // Without the guard nobody looks whether the block is free, so nothing orders what follows.
  if (staging_guarded_) journal().append(JournalKind::kStage, staging_id_, index, static_cast<uint64_t>(Staging::kAcquire));
  journal().append(JournalKind::kStage, staging_id_, index, static_cast<uint64_t>(Staging::kFill));
  block.in_use = true;  // after what may fail: nobody would release it
  return index;
}

void Stream::release_staging(int index) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    journal().append(JournalKind::kStage, staging_id_, index, static_cast<uint64_t>(Staging::kRelease));
    staging_[index].in_use = false;
  }
  work_finished_.notify_all();
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
  const int64_t row_bytes = num_values * static_cast<int64_t>(kElementBytes);
  const int64_t index_bytes = num_rows * static_cast<int64_t>(sizeof(int32_t));
  const int block_index = acquire_staging(index_bytes + num_rows * row_bytes);
  std::byte* staged = staging_[block_index].bytes.data();
  std::memcpy(staged, rows, index_bytes);
  std::memcpy(staged + index_bytes, values, num_rows * row_bytes);
  const auto copy = [this, buffer = std::move(buffer), block_index, staged, num_rows, first_column, row_bytes,
                     index_bytes] {
    struct Release {
      Stream& stream;
      const int index;
      ~Release() { stream.release_staging(index); }
    } release{*this, block_index};
    HoldPoints::instance().pass("stream.before_copy");
    bool poisoned = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      poisoned = !error_.empty();
    }
    if (!poisoned) {
      Faults::instance().pass("copy", "Stream.write_rows");
      journal().append(JournalKind::kStage, staging_id_, block_index, static_cast<uint64_t>(Staging::kRead));
      const uint64_t columns = static_cast<uint64_t>(first_column) << 32 | static_cast<uint64_t>(row_bytes) / kElementBytes;
      const auto* row_ids = reinterpret_cast<const int32_t*>(staged);
      for (int64_t i = 0; i < num_rows; ++i) {
        // Checked when enqueued; checked again because a staging block rewritten too early holds anything.
        if (row_ids[i] < 0 || row_ids[i] >= buffer->num_rows()) continue;
        journal().append(JournalKind::kWrite, buffer->id(), row_ids[i], columns);
        std::memcpy(buffer->row(row_ids[i]) + first_column * kElementBytes, staged + index_bytes + i * row_bytes,
                    row_bytes);
      }
    }
  };
  try {
    enqueue(StreamOperation::kCopy, copy);
  } catch (...) {
    release_staging(block_index);
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.num_copies += 1;
  stats_.bytes_copied += num_rows * row_bytes;
}

void Stream::wait(std::shared_ptr<EventRing> ring, uint64_t generation, const std::string& kind) {
  const bool pinned = ring->announce_wait(generation);  // from here on the slot may not be re-recorded under us
  const auto wait = [this, ring, generation, kind] {
    const auto start = Clock::now();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      newest_kind_ = kind;
    }
    ring->wait(generation, wait_timeout_s_, /*announced=*/true);
    const uint64_t waited = nanoseconds_since(start);
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.num_waits += 1;
    stats_.wait_ns += waited;
    stats_.waits[kind].add(waited);
  };
  try {
    enqueue(StreamOperation::kWait, wait);
  } catch (...) {
    if (pinned) ring->withdraw_wait(generation);
    throw;
  }
}

void Stream::record(std::shared_ptr<EventRing> ring, uint64_t generation) {
  enqueue(StreamOperation::kRecord, [this, ring = std::move(ring), generation, start = Clock::now()] {
    HoldPoints::instance().pass("stream.before_record");
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stats_.held_up[newest_kind_].add(nanoseconds_since(start));
    }
    if (!error().empty()) {
      ring->abandon(generation);
      return;
    }
    try {
      ring->record(generation);
    } catch (...) {
      ring->abandon(generation);  // whoever waits for it would learn of the failure only by running out of time
      throw;
    }
  });
}

void Stream::sync() {
  std::unique_lock<std::mutex> lock(mutex_);
  work_finished_.wait(lock, [&] { return operations_.empty() && !running_operation_; });
  journal().append(JournalKind::kSyncStream, id_, num_finished_);
  JAXSERVE_CHECK(error_.empty(), "Stream.sync", error_);
}

bool Stream::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!operations_.empty() || running_operation_) return false;
  journal().append(JournalKind::kSyncStream, id_, num_finished_);
  return true;
}

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
  stats.num_staging_in_use =
      std::count_if(staging_.begin(), staging_.end(), [](const StagingBlock& block) { return block.in_use; });
  return stats;
}

}  // namespace jaxserve::cpu
