// A channel joins one runner's rings so that a launch ticket can name them all by one number.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "common/live_objects.h"
#include "cuda/event_ring.h"

namespace jaxserve::cuda {

struct Channel {
  // Raises NativeError where there is no device.
  Channel();
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  LiveObject<ObjectKind::kChannel> live;
  std::shared_ptr<EventRing> write_done;  // recorded by the schedule stream, awaited by programs
  std::shared_ptr<EventRing> read_done;   // recorded by programs, awaited by the schedule stream
  std::shared_ptr<EventRing> step_done;   // recorded by programs when they end: the full-execution fence
  double wait_timeout_s = 60.0;
  // One word of mapped host memory that snapshot kernels write and the host reads; see GatherRows::row_error.
  unsigned long long* row_error = nullptr;

  // Reads and clears: (position, row id) of the newest row id outside its table that a finished snapshot met.
  std::optional<std::pair<int64_t, int32_t>> take_row_error();
};

// Registers a channel and returns its number (never 0, never reused).
uint64_t open_channel(std::shared_ptr<Channel> channel);
// The caller makes sure that no launch of the channel is running, and that no graph which holds its events is replayed.
void close_channel(uint64_t number);
// Null for 0 and for a closed channel: handlers of a closed engine neither wait nor record.
std::shared_ptr<Channel> find_channel(uint64_t number);

}  // namespace jaxserve::cuda
