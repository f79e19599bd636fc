// The journal: what streams, executions and host threads did to shared rows and to each other, in one order.
//
// Off, every instrumented place costs one relaxed atomic load. On, it appends one entry under a mutex, so that entries
// have a total order, and that order respects synchronisation: a release is appended before a waiter can see it, an
// acquire after its wait has returned. A reader may therefore replay the entries in order.
//
// Who acts is a property of the thread: a stream's thread is the stream, a handler is its execution for as long as it
// runs, every other thread is a host thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace jaxserve {

// The numbers are the ABI with jaxserve/barrier/journal.py, which says what each field holds.
enum class JournalKind : uint32_t {
  kEnqueue = 1,
  kBeginOperation = 2,
  kEndOperation = 3,
  kRelease = 4,
  kAcquire = 5,
  kRead = 6,
  kWrite = 7,
  kStage = 8,
  kDispatch = 9,
  kBeginExecution = 10,
  kEndExecution = 11,
  kCollect = 12,
  kReserve = 13,
  kAbandon = 14,
  kOperand = 15,
  kSyncStream = 16,
  kGiveUp = 17,
};

enum class StreamOperation : uint64_t { kCopy = 1, kWait = 2, kRecord = 3 };
enum class Staging : uint64_t { kFill = 1, kRead = 2, kRelease = 3, kAcquire = 4 };

struct JournalEntry {
  int64_t time_ns;  // steady_clock
  uint32_t kind;
  uint32_t origin;  // index into strings(): the source line on whose behalf it happens; 0: not known
  uint64_t actor;
  uint64_t subject;
  uint64_t a;
  uint64_t b;
};
static_assert(sizeof(JournalEntry) == 48, "the layout of ENTRY in jaxserve/barrier/journal.py");

class Journal {
 public:
  static Journal& instance();

  bool is_on() const { return on_.load(std::memory_order_relaxed); }
  // Starts with no entries; holds at most `capacity` undrained ones.
  void start(std::size_t capacity);
  void stop();
  // Moves the entries since the last drain out; returns how many found no room.
  uint64_t drain(std::vector<JournalEntry>& entries);

  // An id for a ring, buffer, stream, staging area or launch; never 0, never used twice.
  uint64_t next_id() { return newest_id_.fetch_add(1, std::memory_order_relaxed) + 1; }
  // An id with a name, which is kept for as long as the process lives.
  uint64_t named_id(const std::string& name);
  std::map<uint64_t, std::string> names();

  // The index of a string; the same one for equal strings. Index 0 is the empty string.
  uint32_t intern(const std::string& text);
  std::vector<std::string> strings();

  // Appends for the actor of this thread. Nothing happens while the journal is off.
  void append(JournalKind kind, uint64_t subject, uint64_t a, uint64_t b, uint32_t origin) {
    if (is_on()) append_on(kind, subject, a, b, origin);
  }
  void append(JournalKind kind, uint64_t subject, uint64_t a = 0, uint64_t b = 0) {
    if (is_on()) append_on(kind, subject, a, b, current_origin());
  }

  // Which shared buffer lies at an address that a program was given; 0: none does.
  void add_buffer(const void* data, uint64_t id);
  void remove_buffer(const void* data);
  uint64_t buffer_at(const void* data);

  static uint64_t stream_actor(uint64_t stream) { return (uint64_t{2} << 56) | stream; }
  static uint64_t execution_actor(uint64_t launch) { return (uint64_t{3} << 56) | launch; }
  // What this thread acts as; 0: a host thread.
  static uint64_t& current_actor();
  // The source line that this thread acts for.
  static uint32_t& current_origin();

 private:
  void append_on(JournalKind kind, uint64_t subject, uint64_t a, uint64_t b, uint32_t origin);

  std::atomic<bool> on_{false};
  std::atomic<uint64_t> newest_id_{0};
  std::mutex mutex_;                                  // taken last of all locks
  std::vector<JournalEntry> entries_;                 // guarded by mutex_
  std::size_t capacity_ = 0;                          // guarded by mutex_
  uint64_t num_dropped_ = 0;                          // guarded by mutex_
  std::map<uint64_t, std::string> names_;             // guarded by mutex_
  std::vector<std::string> strings_{std::string()};   // guarded by mutex_
  std::unordered_map<std::string, uint32_t> indices_;       // guarded by mutex_
  std::unordered_map<const void*, uint64_t> buffers_;       // guarded by mutex_
};

// For as long as it lives this thread acts as somebody else: a handler as its execution.
class ActingAs {
 public:
  explicit ActingAs(uint64_t actor) : before_(Journal::current_actor()) { Journal::current_actor() = actor; }
  ~ActingAs() { Journal::current_actor() = before_; }
  ActingAs(const ActingAs&) = delete;
  ActingAs& operator=(const ActingAs&) = delete;

 private:
  const uint64_t before_;
};

// "handlers.cc:84 snapshot" as an origin, interned once for each place.
#define JAXSERVE_ORIGIN(what)                                                                                         \
  ([]() -> uint32_t {                                                                                                 \
    static const uint32_t index = ::jaxserve::Journal::instance().intern(::jaxserve::origin_text(__FILE__, __LINE__, what)); \
    return index;                                                                                                     \
  }())

inline std::string origin_text(const char* file, int line, const char* what) {
  const std::string path(file);
  const auto csrc = path.rfind("csrc/");
  return (csrc == std::string::npos ? path : path.substr(csrc)) + ":" + std::to_string(line) + " " + what;
}

}  // namespace jaxserve
