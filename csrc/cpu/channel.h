// A channel joins one runner's rings so that a launch ticket can name them all by one number.
#pragma once

#include <cstdint>
#include <memory>

#include "common/live_objects.h"
#include "cpu/event_ring.h"

namespace jaxserve::cpu {

struct Channel {
  LiveObject<ObjectKind::kChannel> live;
  std::shared_ptr<EventRing> write_done;  // recorded by the schedule stream, awaited by programs
  std::shared_ptr<EventRing> read_done;   // recorded by programs, awaited by the schedule stream
  std::shared_ptr<EventRing> step_done;   // recorded by programs when they end: the full-execution fence
  double wait_timeout_s = 60.0;
};

// Registers a channel and returns its number (never 0, never reused).
uint64_t open_channel(std::shared_ptr<Channel> channel);
void close_channel(uint64_t number);
// Null for 0 and for a closed channel: its handlers record nothing, and fail if they ought to wait.
std::shared_ptr<Channel> find_channel(uint64_t number);

}  // namespace jaxserve::cpu
