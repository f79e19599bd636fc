// The schedule stream's CPU twin: an in-order native thread. The host enqueues and returns; operations run one by one.
//
// Row writes own their source: values are copied into a staging block when enqueued, and the block is reused only after
// the copy out of it has run. A failed operation (a wait that timed out) poisons the stream: later copies are skipped
// and later records abandoned, so that a program waiting for them fails instead of reading half-written rows.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/durations.h"
#include "common/journal.h"
#include "common/live_objects.h"
#include "cpu/event_ring.h"
#include "cpu/shared_buffer.h"

namespace jaxserve::cpu {

struct StreamStats {
  uint64_t num_copies = 0;    // handed over, whether they have run or not
  uint64_t bytes_copied = 0;  // by those
  uint64_t num_waits = 0;
  uint64_t wait_ns = 0;          // time the stream stood still in waits
  uint64_t staging_wait_ns = 0;  // time the host stood still for a free staging block
  uint64_t num_staging_in_use = 0;  // blocks that hold a write which has not run
  // By the kind of fence, as wait() was told. `held_up`: from the call of record() until the stream got to it, which is
  // how long the writes in front of it stood behind the wait before them.
  std::map<std::string, Durations> waits;
  std::map<std::string, Durations> held_up;
};

class Stream {
 public:
  // `staging_guarded` false reuses staging blocks at once: only for the test that must catch it. `name` is for the
  // journal.
  Stream(int num_staging_blocks, int64_t staging_block_bytes, double wait_timeout_s, bool staging_guarded = true,
         const std::string& name = "stream");
  ~Stream();  // runs what is queued, then joins
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Enqueues buffer[rows[i], first_column : first_column + num_values] = values[i, :]. Blocks only for a staging block.
  // Raises NativeError on indices outside the buffer, before anything is enqueued.
  void write_rows(std::shared_ptr<SharedBuffer> buffer, const int32_t* rows, int64_t num_rows, int64_t first_column,
                  const void* values, int64_t num_values);
  // Enqueues a wait for that very generation. `kind` names the fence in the statistics.
  void wait(std::shared_ptr<EventRing> ring, uint64_t generation, const std::string& kind);
  // Enqueues a record.
  void record(std::shared_ptr<EventRing> ring, uint64_t generation);
  // Blocks the host until everything enqueued so far has run. Raises NativeError if the stream is poisoned.
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
  struct Operation {
    StreamOperation type;
    uint64_t number;  // 1, 2, ... in the order of the stream
    uint32_t origin;
    std::function<void()> run;
  };

  struct StagingBlock {
    std::vector<std::byte> bytes;
    bool in_use = false;
  };

  void enqueue(StreamOperation type, std::function<void()> run);
  int acquire_staging(int64_t bytes);
  void release_staging(int index);
  void run();

  LiveObject<ObjectKind::kStream> live_;
  const double wait_timeout_s_;
  const bool staging_guarded_;
  const uint64_t id_;
  const uint64_t staging_id_;
  std::mutex mutex_;
  std::condition_variable work_available_;
  std::condition_variable work_finished_;
  std::deque<Operation> operations_;              // guarded by mutex_
  uint64_t num_enqueued_ = 0;                     // guarded by mutex_
  uint64_t num_finished_ = 0;                     // guarded by mutex_
  std::vector<StagingBlock> staging_;             // guarded by mutex_; bytes of a block belong to its holder
  int next_staging_ = 0;                          // guarded by mutex_
  bool running_operation_ = false;                // guarded by mutex_
  bool stopping_ = false;                         // guarded by mutex_
  std::string error_;                             // guarded by mutex_
  StreamStats stats_;                             // guarded by mutex_
  std::string newest_kind_ = "none";              // of the last wait; guarded by mutex_
  std::thread thread_;
};

}  // namespace jaxserve::cpu
