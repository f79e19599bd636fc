// XLA FFI handlers of the CPU twin: snapshot, record, hold.
//
// XLA orders by data flow only, so each handler is tied in by its operands and results: nothing can read a shared row
// before the snapshot's wait, because the only readers of shared rows use the snapshot's outputs.
#include <cstring>
#include <string>

#include "common/faults.h"
#include "common/give_up.h"
#include "common/hold_points.h"
#include "common/journal.h"
#include "common/launch_ticket.h"
#include "cpu/channel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve::cpu {
namespace {

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("jaxserve_snapshot: " + message); }

// Waits for the schedule stream's writes of this launch.
ffi::Error wait_for_writes(const LaunchTicket& ticket, const Channel* channel) {
  if (channel == nullptr || ticket.write_done == 0) return ffi::Error::Success();
  try {
    if (!channel->write_done->wait(ticket.write_done, channel->wait_timeout_s)) {
      return ffi::Error::Internal("jaxserve_snapshot: the row writes of step " + std::to_string(ticket.step_number) +
                                  " were given up; see the schedule stream's error");
    }
  } catch (const NativeError& error) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error.what());
  }
  return ffi::Error::Success();
}

// A copy that was told to fail.
ffi::Error fail_copy() {
  try {
    Faults::instance().pass("copy", "jaxserve_snapshot");
  } catch (const NativeError& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

ffi::Error record(EventRing& ring, uint64_t generation) {
  if (generation == 0) return ffi::Error::Success();
  try {
    ring.record(generation);
  } catch (const NativeError& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

// Journals that this thread's execution reads (or writes) columns [0, width) of a row, if a shared buffer lies there.
void note_access(JournalKind kind, const void* table, int64_t row, int64_t width, uint32_t origin) {
  Journal& journal = Journal::instance();
  if (!journal.is_on()) return;
  const uint64_t buffer = journal.buffer_at(table);
  if (buffer != 0) journal.append(kind, buffer, row, static_cast<uint64_t>(width), origin);
}

void note_read(const void* table, int64_t row, int64_t width, uint32_t origin) {
  note_access(JournalKind::kRead, table, row, width, origin);
}
ffi::Error snapshot_rows(const LaunchTicket& ticket, const Channel* channel, ffi::RemainingArgs& operands,
                         ffi::RemainingRets& results);

// Operands: ticket uint32[16], row ids int32[B], then tables [slots, columns] of 4-byte elements.
// Results: the row ids, then one table each with result[b, :] = table[row_ids[b], :width].
// The row ids may be a shared buffer themselves, so they too are read only after the wait.
// A ticket with nothing but its launch set neither waits nor records: layers that read live rows pass one.
ffi::Error snapshot(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (operands.size() < 2 || results.size() != operands.size() - 1) {
    return invalid("wanted ticket, row ids and tables, with one result for each but the ticket; got " +
                   std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) + " results");
  }
  auto ticket_operand = operands.get<ffi::AnyBuffer>(0);
  auto row_ids_operand = operands.get<ffi::AnyBuffer>(1);
  auto row_ids_result = results.get<ffi::AnyBuffer>(0);
  if (ticket_operand.has_error() || row_ids_operand.has_error() || row_ids_result.has_error()) {
    return invalid("operands must be arrays");
  }
  if (ticket_operand->size_bytes() != sizeof(LaunchTicket)) return invalid("the ticket must be uint32[16]");
  const LaunchTicket ticket = LaunchTicket::load(ticket_operand->untyped_data());
  const auto channel = find_channel(ticket.channel);
  if (channel == nullptr && ticket.write_done != 0) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "jaxserve_snapshot: step " + std::to_string(ticket.step_number) +
                          " names row writes of an engine that is closed");
  }

  const ActingAs execution(Journal::execution_actor(ticket.launch));
  Journal& journal = Journal::instance();
  if (ticket.channel != 0) journal.append(JournalKind::kBeginExecution, ticket.launch, 0, 0, JAXSERVE_ORIGIN("snapshot"));
  ffi::Error error = snapshot_rows(ticket, channel.get(), operands, results);
  if (error.failure() && channel != nullptr) give_up_records(*channel, ticket);
  return error;
}

ffi::Error snapshot_rows(const LaunchTicket& ticket, const Channel* channel, ffi::RemainingArgs& operands,
                         ffi::RemainingRets& results) {
  auto row_ids_operand = operands.get<ffi::AnyBuffer>(1);
  auto row_ids_result = results.get<ffi::AnyBuffer>(0);
  if (ffi::Error error = wait_for_writes(ticket, channel); error.failure()) return error;
  HoldPoints::instance().pass("snapshot.before_reads");
  if (ffi::Error error = fail_copy(); error.failure()) return error;

  const int64_t num_rows = static_cast<int64_t>((*row_ids_result)->element_count());
  if (static_cast<int64_t>(row_ids_operand->element_count()) < num_rows) return invalid("fewer row ids than rows");
  auto* row_ids = static_cast<int32_t*>((*row_ids_result)->untyped_data());
  note_read(row_ids_operand->untyped_data(), 0, num_rows, JAXSERVE_ORIGIN("snapshot"));
  std::memcpy(row_ids, row_ids_operand->untyped_data(), num_rows * sizeof(int32_t));

  for (std::size_t i = 2; i < operands.size(); ++i) {
    auto table = operands.get<ffi::AnyBuffer>(i);
    auto copy = results.get<ffi::AnyBuffer>(i - 1);
    if (table.has_error() || copy.has_error()) return invalid("operands must be arrays");
    if (table->dimensions().size() != 2 || (*copy)->dimensions().size() != 2) return invalid("tables must be 2-D");
    const int64_t table_rows = table->dimensions()[0];
    const int64_t columns = table->dimensions()[1];
    const int64_t width = (*copy)->dimensions()[1];
    if (width > columns) return invalid("a result is wider than its table");
    const auto* source = static_cast<const std::byte*>(table->untyped_data());
    auto* target = static_cast<std::byte*>((*copy)->untyped_data());
    for (int64_t b = 0; b < num_rows; ++b) {
      const int64_t row = row_ids[b];
      if (row < 0 || row >= table_rows) {
        return invalid("row id " + std::to_string(row) + " at position " + std::to_string(b) + " is outside a table of " +
                       std::to_string(table_rows) + " rows (step " + std::to_string(ticket.step_number) + ")");
      }
      note_read(source, row, width, JAXSERVE_ORIGIN("snapshot"));
      std::memcpy(target + b * width * 4, source + row * columns * 4, width * 4);
    }
  }

  HoldPoints::instance().pass("snapshot.before_record");
  if (channel != nullptr) {
    if (ffi::Error error = record(*channel->read_done, ticket.read_done_marker); error.failure()) return error;
  }
  HoldPoints::instance().pass("snapshot.after_record");
  return ffi::Error::Success();
}

// Operands: ticket uint32[16], then anything whose producers must have run. Result: uint32[1], always zero, so that
// later code can depend on it.
ffi::Error record_end(ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> result) {
  auto ticket_operand = operands.get<ffi::AnyBuffer>(0);
  if (ticket_operand.has_error() || ticket_operand->size_bytes() != sizeof(LaunchTicket)) {
    return ffi::Error::InvalidArgument("jaxserve_record_end: the first operand must be the ticket, uint32[16]");
  }
  const LaunchTicket ticket = LaunchTicket::load(ticket_operand->untyped_data());
  std::memset(result->untyped_data(), 0, result->size_bytes());
  const ActingAs execution(Journal::execution_actor(ticket.launch));
  Journal::instance().append(JournalKind::kEndExecution, ticket.launch, 0, 0, JAXSERVE_ORIGIN("record_end"));
  HoldPoints::instance().pass("end.before_record");
  const auto channel = find_channel(ticket.channel);
  if (channel == nullptr) return ffi::Error::Success();
  ffi::Error error = record(*channel->read_done, ticket.read_done_end);
  if (error.success()) error = record(*channel->step_done, ticket.step_done);
  if (error.failure()) give_up_records(*channel, ticket);
  return error;
}

// Journals what XLA code did that no handler of ours saw. Compiled into programs that are built for the race check only.
// Operands: ticket uint32[16], row ids int32[B], then `widths.size()` shared tables whose columns [0, width) were read
// at these rows, then anything whose producers must have run. Row ids that are a shared buffer were read themselves.
// `what`: "begin" and "end" of the execution, "reads" or "writes". Result: int32[1] zero, to be added to what must come later.
ffi::Error note(ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> result, std::string_view what,
                std::string_view source, ffi::Span<const int64_t> widths) {
  std::memset(result->untyped_data(), 0, result->size_bytes());
  Journal& journal = Journal::instance();
  if (!journal.is_on()) return ffi::Error::Success();
  auto ticket_operand = operands.get<ffi::AnyBuffer>(0);
  if (ticket_operand.has_error() || ticket_operand->size_bytes() != sizeof(LaunchTicket)) {
    return ffi::Error::InvalidArgument("jaxserve_note: the first operand must be the ticket, uint32[16]");
  }
  const LaunchTicket ticket = LaunchTicket::load(ticket_operand->untyped_data());
  const ActingAs execution(Journal::execution_actor(ticket.launch));
  const uint32_t origin = journal.intern(std::string(source));
  if (what == "begin") journal.append(JournalKind::kBeginExecution, ticket.launch, 0, 0, origin);
  if (what == "end") journal.append(JournalKind::kEndExecution, ticket.launch, 0, 0, origin);
  if (widths.size() == 0) return ffi::Error::Success();
  auto row_ids_operand = operands.get<ffi::AnyBuffer>(1);
  if (row_ids_operand.has_error() || operands.size() < 2 + widths.size()) {
    return ffi::Error::InvalidArgument("jaxserve_note: wanted row ids and one table for each width");
  }
  const auto num_rows = static_cast<int64_t>(row_ids_operand->element_count());
  const auto* row_ids = static_cast<const int32_t*>(row_ids_operand->untyped_data());
  note_read(row_ids, 0, num_rows, origin);
  const JournalKind kind = what == "writes" ? JournalKind::kWrite : JournalKind::kRead;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    auto table = operands.get<ffi::AnyBuffer>(2 + i);
    if (table.has_error()) return ffi::Error::InvalidArgument("jaxserve_note: operands must be arrays");
    for (int64_t b = 0; b < num_rows; ++b) note_access(kind, table->untyped_data(), row_ids[b], widths[i], origin);
  }
  return ffi::Error::Success();
}

// Operands: anything whose producers must have run. Result: int32[1] zero, to be added to what must come later.
ffi::Error hold(ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result, std::string_view point) {
  std::memset(result->untyped_data(), 0, result->size_bytes());
  HoldPoints::instance().pass(std::string(point).c_str());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_snapshot, snapshot, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_record_end, record_end,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_note, note,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("what")
                                  .Attr<std::string_view>("source")
                                  .Attr<ffi::Span<const int64_t>>("widths"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cpu_hold, hold,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<std::string_view>("point"));

}  // namespace jaxserve::cpu
