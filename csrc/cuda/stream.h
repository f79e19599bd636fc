// The schedule stream: one non-blocking cudaStream_t that the scheduler writes shared rows on.
//
// Row writes own their source: values are copied into a page-locked staging block when enqueued, and a block is reused
// only after the device has passed the copy out of it. A failed wait poisons the stream: later copies are skipped and
// later records abandoned, so that a program waiting for them fails instead of reading half-written rows.
//
// Unlike on the CPU, everything is issued to the device at once, on the caller's thread.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/durations.h"
#include "common/live_objects.h"
#include "cuda/event_ring.h"
#include "cuda/shared_buffer.h"

namespace jaxserve::cuda {

struct StreamStats {
  uint64_t num_copies = 0;    // handed over, whether they have run or not
  uint64_t bytes_copied = 0;  // by those
  uint64_t num_waits = 0;
  // Always 0: how long the device stood still is not known without timing events, which cost more than our events.
  uint64_t wait_ns = 0;
  uint64_t staging_wait_ns = 0;  // time the host stood still for a free staging block
  uint64_t num_staging_in_use = 0;  // blocks that the device may still read
  // Always empty, for the same reason.
  std::map<std::string, Durations> waits;
  std::map<std::string, Durations> held_up;
};

class Stream {
 public:
  // `staging_guarded` false reuses staging blocks at once: only for the test that must catch it.
  // Raises NativeError on bad sizes, and where there is no device. `name` is for the journal.
  Stream(int num_staging_blocks, int64_t staging_block_bytes, double wait_timeout_s, bool staging_guarded = true,
         const std::string& name = "stream");
  ~Stream();  // waits for what has been issued
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Enqueues buffer[rows[i], first_column : first_column + num_values] = values[i, :]; of a row given twice the last
  // values count. Blocks only for a staging block. Raises NativeError on indices outside the buffer, before anything
  // is enqueued.
  void write_rows(std::shared_ptr<SharedBuffer> buffer, const int32_t* rows, int64_t num_rows, int64_t first_column,
                  const void* values, int64_t num_values);
  // Makes the stream wait for that very generation. Blocks the host until its record has been issued; poisons the
  // stream if that takes longer than wait_timeout_s. Raises NativeError if the generation was never reserved.
  // `kind` names the fence in the CPU twin's statistics.
  void wait(std::shared_ptr<EventRing> ring, uint64_t generation, const std::string& kind);
  // Issues a record.
  void record(std::shared_ptr<EventRing> ring, uint64_t generation);
  // Blocks the host until everything issued so far has run. Raises NativeError if the stream is poisoned.
  void sync();
  // Polls: nothing is queued or running.
  bool is_done();
  // Why the stream is poisoned; empty when it is not.
  std::string error();
  // Makes a poisoned stream usable again.
  void reset();
  StreamStats stats();
  uint64_t id() const { return id_; }                  // in the journal
  uint64_t staging_id() const { return staging_id_; }  // in the journal

 private:
  struct StagingBlock {
    std::byte* bytes = nullptr;    // page-locked host memory
    std::byte* on_device = nullptr;  // the same memory as the device sees it
    int64_t num_bytes = 0;
    cudaEvent_t read_done = nullptr;  // recorded behind the kernel that reads the block
  };

  StagingBlock& acquire_staging_locked(int64_t num_bytes);
  void wait_for_staging_locked(const StagingBlock& block);
  void allocate_staging(StagingBlock& block, int64_t num_bytes);
  std::vector<int64_t> last_of_each_row_locked(const SharedBuffer& buffer, const int32_t* rows, int64_t num_rows);
  void release();

  LiveObject<ObjectKind::kStream> live_;
  const double wait_timeout_s_;
  const bool staging_guarded_;
  const uint64_t id_;
  const uint64_t staging_id_;
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  std::vector<StagingBlock> staging_;      // guarded by mutex_
  std::size_t next_staging_ = 0;           // guarded by mutex_
  std::vector<uint64_t> row_last_write_;   // guarded by mutex_; per row: the write_rows call that staged it last
  uint64_t num_writes_ = 0;                // guarded by mutex_
  std::string error_;                      // guarded by mutex_
  StreamStats stats_;                      // guarded by mutex_
};

}  // namespace jaxserve::cuda
