// XLA FFI handlers of the CUDA twin: snapshot, record, hold, and the one that learns XLA's compute stream.
//
// They enqueue on the stream that XLA gives them and never block on the device. Each marker comes in two variants:
//
//   jaxserve_snapshot, jaxserve_record_end
//       Not command-buffer compatible: XLA calls them on every execution, and a graph may start right behind them.
//       The ticket operand lies in device memory and is ignored; the generations come from current_launch().
//   jaxserve_snapshot_graph, jaxserve_record_end_graph
//       Command-buffer compatible: called once eagerly and once under capture, and never on replay. They know no
//       generations, only the channel (a static attribute: the graph keeps its events for ever), and use the fixed
//       events of its rings. The host calls note_graph_record after each dispatch. Not allowed inside cond and while
//       bodies: CUDA refuses event nodes there. Inside a graph only data flow orders, so every reader of a shared
//       buffer must feed the snapshot, and the end record fences no more than the operands it is given: take
//       step_done from record_on_compute_stream instead where something else may run last.
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "common/current_launch.h"
#include "common/faults.h"
#include "common/give_up.h"
#include "cuda/channel.h"
#include "cuda/check_cuda.h"
#include "cuda/compute_stream.h"
#include "cuda/hold_stream.h"
#include "cuda/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve::cuda {
namespace {

// Runs the body of a handler that records for the current launch, which gives its records up if that fails.
template <typename Body>
void or_give_up(Body body) {
  const LaunchTicket ticket = current_launch();
  const auto channel = find_channel(ticket.channel);
  try {
    body(ticket, channel);
  } catch (...) {
    if (channel != nullptr) give_up_records(*channel, ticket);
    throw;
  }
}

// Runs a handler's body: no exception may cross XLA's C interface.
template <typename Body>
ffi::Error guarded(Body body) {
  try {
    body();
  } catch (const WaitTimeout& error) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

void require(bool condition, const std::string& reason) {
  JAXSERVE_CHECK(condition, "jaxserve_snapshot", reason);
}

void record(EventRing& ring, uint64_t generation, cudaStream_t stream) {
  if (generation != 0) ring.record_on(generation, stream);
}

// Issues the kernels of a snapshot.
// Operands: ticket uint32[16], row ids int32[B], then tables [slots, columns] of 4-byte elements.
// Results: the row ids, then one table each with result[b, :] = table[row_ids[b], :width].
void gather(ffi::RemainingArgs& operands, ffi::RemainingRets& results, unsigned long long* row_error,
            cudaStream_t stream) {
  require(operands.size() >= 2 && results.size() == operands.size() - 1,
          "wanted ticket, row ids and tables, with one result for each but the ticket; got " +
              std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) + " results");
  auto ticket = operands.get<ffi::AnyBuffer>(0);
  auto row_ids = operands.get<ffi::AnyBuffer>(1);
  auto row_ids_result = results.get<ffi::AnyBuffer>(0);
  require(!ticket.has_error() && !row_ids.has_error() && !row_ids_result.has_error(), "operands must be arrays");
  require(ticket->size_bytes() == sizeof(LaunchTicket), "the ticket must be uint32[16]");
  require(row_ids->element_type() == ffi::DataType::S32 && (*row_ids_result)->element_type() == ffi::DataType::S32,
          "row ids must be int32");
  const auto num_rows = static_cast<int64_t>((*row_ids_result)->element_count());
  require(static_cast<int64_t>(row_ids->element_count()) >= num_rows, "fewer row ids than rows");

  Faults::instance().pass("copy", "jaxserve_snapshot");
  GatherRows launch{};
  launch.row_ids = static_cast<const int32_t*>(row_ids->untyped_data());
  launch.row_ids_out = static_cast<int32_t*>((*row_ids_result)->untyped_data());
  launch.row_error = row_error;
  launch.num_row_ids = static_cast<int32_t>(num_rows);
  for (std::size_t i = 2; i < operands.size(); ++i) {
    auto table = operands.get<ffi::AnyBuffer>(i);
    auto copy = results.get<ffi::AnyBuffer>(i - 1);
    require(!table.has_error() && !copy.has_error(), "operands must be arrays");
    require(table->dimensions().size() == 2 && (*copy)->dimensions().size() == 2, "tables must be 2-D");
    require(ffi::ByteWidth(table->element_type()) == 4 && (*copy)->element_type() == table->element_type(),
            "tables and their results must have the same 4-byte elements");
    GatherTable entry{};
    entry.source = static_cast<const uint32_t*>(table->untyped_data());
    entry.target = static_cast<uint32_t*>((*copy)->untyped_data());
    entry.num_rows = static_cast<int32_t>(table->dimensions()[0]);
    entry.num_columns = static_cast<int32_t>(table->dimensions()[1]);
    entry.width = static_cast<int32_t>((*copy)->dimensions()[1]);
    require(entry.width <= entry.num_columns, "a result is wider than its table");
    require(entry.num_rows > 0 || num_rows == 0, "a table has no rows");
    require((*copy)->dimensions()[0] == num_rows, "a result has another number of rows than the row ids");
    launch.tables[launch.num_tables++] = entry;
    if (launch.num_tables == kMaxGatherTables) {
      launch_gather_rows(launch, stream);
      launch.num_tables = 0;
      launch.row_ids_out = nullptr;  // written by the launch before
    }
  }
  if (launch.num_tables > 0 || launch.row_ids_out != nullptr) launch_gather_rows(launch, stream);
}

// Result: uint32[1], always zero, so that later code can depend on it.
void zero(ffi::Result<ffi::AnyBuffer>& result, cudaStream_t stream) {
  JAXSERVE_CUDA_CHECK(cudaMemsetAsync(result->untyped_data(), 0, result->size_bytes(), stream));
}

ffi::Error snapshot(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return guarded([&] {
    or_give_up([&](const LaunchTicket& ticket, const std::shared_ptr<Channel>& channel) {
      if (channel != nullptr && ticket.write_done != 0) {
        require(channel->write_done->stream_wait(ticket.write_done, stream, channel->wait_timeout_s),
                "the row writes of step " + std::to_string(ticket.step_number) +
                    " were given up; see the schedule stream's error");
      }
      hold_stream("snapshot.before_reads", stream);
      gather(operands, results, channel != nullptr ? channel->row_error : nullptr, stream);
      hold_stream("snapshot.before_record", stream);
      if (channel != nullptr) record(*channel->read_done, ticket.read_done_marker, stream);
      hold_stream("snapshot.after_record", stream);
    });
  });
}

ffi::Error snapshot_graph(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                          int64_t channel_number) {
  return guarded([&] {
    // A closed channel is an error here and not a warm-up: what is captured now would lack its events for ever.
    const auto channel = find_channel(static_cast<uint64_t>(channel_number));
    require(channel != nullptr, "channel " + std::to_string(channel_number) + " is not open");
    channel->write_done->graph_wait(stream);
    hold_stream("snapshot.before_reads", stream);
    gather(operands, results, channel->row_error, stream);
    hold_stream("snapshot.before_record", stream);
    channel->read_done->graph_record(stream);
    hold_stream("snapshot.after_record", stream);
  });
}

// Operands: ticket uint32[16], then anything whose producers must have run.
ffi::Error record_end(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  return guarded([&] {
    or_give_up([&](const LaunchTicket& ticket, const std::shared_ptr<Channel>& channel) {
      zero(result, stream);
      hold_stream("end.before_record", stream);
      if (channel == nullptr) return;
      record(*channel->read_done, ticket.read_done_end, stream);
      record(*channel->step_done, ticket.step_done, stream);
    });
  });
}

// Attribute `read_done`: whether this program's reads end only here (POST_REPLAY).
ffi::Error record_end_graph(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result,
                            int64_t channel_number, bool read_done) {
  return guarded([&] {
    zero(result, stream);
    hold_stream("end.before_record", stream);
    const auto channel = find_channel(static_cast<uint64_t>(channel_number));
    JAXSERVE_CHECK(channel != nullptr, "jaxserve_record_end",
                   "channel " + std::to_string(channel_number) + " is not open");
    if (read_done) channel->read_done->graph_record(stream);
    channel->step_done->graph_record(stream);
  });
}

// Operands: anything whose producers must have run. Result: int32[1] zero, to be added to what must come later.
ffi::Error hold(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result, std::string_view point) {
  return guarded([&] {
    zero(result, stream);
    hold_stream(std::string(point).c_str(), stream);
  });
}

ffi::Error learn_compute_stream(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  return guarded([&] {
    // A capture stream is XLA's for a moment only; this handler isn't graph-compatible, so it should never see one.
    JAXSERVE_CHECK(!is_capturing(stream), "jaxserve_compute_stream", "called on a stream that is being captured");
    set_compute_stream(stream);
    zero(result, stream);
  });
}

using Stream = ffi::PlatformStream<cudaStream_t>;

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cuda_snapshot, snapshot,
                              ffi::Ffi::Bind().Ctx<Stream>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxserve_cuda_snapshot_graph, snapshot_graph,
    ffi::Ffi::Bind().Ctx<Stream>().RemainingArgs().RemainingRets().Attr<int64_t>("channel"),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cuda_record_end, record_end,
                              ffi::Ffi::Bind().Ctx<Stream>().RemainingArgs().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cuda_record_end_graph, record_end_graph,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("channel")
                                  .Attr<bool>("read_done"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxserve_cuda_hold, hold,
    ffi::Ffi::Bind().Ctx<Stream>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<std::string_view>("point"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_cuda_compute_stream, learn_compute_stream,
                              ffi::Ffi::Bind().Ctx<Stream>().RemainingArgs().Ret<ffi::AnyBuffer>());

}  // namespace jaxserve::cuda
