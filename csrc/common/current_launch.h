// The ticket of the launch that this thread is dispatching.
//
// A CUDA handler can't read the ticket operand: it lies in device memory. But with one device and default settings XLA
// calls the handlers on the thread that dispatches, before the jitted call returns, so the host leaves the ticket here
// first and resets it afterwards. Where XLA dispatches from a thread of its own the handlers find a ticket of zeros:
// they record nothing, and the wait for read_done times out with its generation instead of passing silently.
// The CPU twin ignores this: there the ticket travels as an operand (see launch_ticket.h).
#pragma once

#include "common/launch_ticket.h"

namespace jaxserve {

inline LaunchTicket& current_launch() {
  static thread_local LaunchTicket ticket{};
  return ticket;
}

}  // namespace jaxserve
