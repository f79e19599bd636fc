// What an execution owes when one of its handlers fails: XLA runs no later handler of it, so they will record nothing.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/launch_ticket.h"

namespace jaxserve {

// Gives up the records of a launch that have not been made. The host would do so when it collects the launch, but it
// may be standing in the dispatch of the next one, which waits for row writes that stand behind these records.
template <typename Channel>
void give_up_records(Channel& channel, const LaunchTicket& ticket) noexcept {
  const auto abandon = [](auto& ring, uint64_t generation) {
    if (generation == 0) return;
    try {
      ring.abandon(generation);
    } catch (const NativeError&) {
      // Never reserved: nobody can wait for it.
    }
  };
  abandon(*channel.read_done, ticket.read_done_marker);
  abandon(*channel.read_done, ticket.read_done_end);
  abandon(*channel.step_done, ticket.step_done);
}

}  // namespace jaxserve
