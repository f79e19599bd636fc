// What one launch tells the handlers inside its program.
//
// On the CPU a program runs some time after it was dispatched, on another thread, so nothing may be taken from "now":
// the launch ticket travels as an operand of the program and names every generation it concerns. Zero means "not in
// this launch": a ticket of zeros (warm-up, ahead-of-time checks) neither waits nor records.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxserve {

struct LaunchTicket {
  uint64_t channel;            // which runner's rings the generations belong to
  uint64_t write_done;         // wait for this generation of the schedule stream's writes before the first read
  uint64_t read_done_marker;   // record this generation where the snapshot's reads end (IN_REPLAY, PRE_REPLAY)
  uint64_t read_done_end;      // record this generation when the program ends (POST_REPLAY)
  uint64_t step_done;          // record this generation when the program ends (the full-execution fence)
  uint64_t step_number;        // for messages only
  uint64_t launch;             // which launch of the process this is; for the journal, and 0 in a ticket of zeros
  uint64_t reserved;

  static LaunchTicket load(const void* operand) {
    LaunchTicket ticket;
    std::memcpy(&ticket, operand, sizeof(ticket));
    return ticket;
  }
};

static_assert(sizeof(LaunchTicket) == 64, "the ticket operand is uint32[16]");

}  // namespace jaxserve
