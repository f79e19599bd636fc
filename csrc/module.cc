// The Python bindings. Built once per twin (JAXSERVE_CUDA selects the CUDA one).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/current_launch.h"
#include "common/dlpack.h"
#include "common/durations.h"
#include "common/faults.h"
#include "common/hold_points.h"
#include "common/journal.h"
#include "common/launch_ticket.h"
#include "common/live_objects.h"
#include "common/ngram_trie.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAXSERVE_CUDA
#include "cuda/decoder/bindings.h"
#include "cuda/twin.h"
namespace twin = jaxserve::cuda;
#define JAXSERVE_MODULE _cuda
#define JAXSERVE_PLATFORM "CUDA"
#else
#include "cpu/twin.h"
namespace twin = jaxserve::cpu;
#define JAXSERVE_MODULE _cpu
#define JAXSERVE_PLATFORM "cpu"
#endif

namespace py = pybind11;
using jaxserve::Faults;
using jaxserve::HoldPoints;
using jaxserve::Journal;
using jaxserve::NgramTrie;

namespace {

// A capsule that frees an unconsumed export; a consumer renames it to "used_dltensor" and takes over the deleter.
py::capsule export_dlpack(twin::SharedBuffer& buffer) {
  DLManagedTensorAbi* tensor = buffer.to_dlpack();
  return py::capsule(tensor, "dltensor", [](PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor")) {
      auto* unused = static_cast<DLManagedTensorAbi*>(PyCapsule_GetPointer(capsule, "dltensor"));
      unused->deleter(unused);
    }
  });
}

void set_current_launch(const py::buffer& ticket) {
  const py::buffer_info bytes = ticket.request();
  JAXSERVE_CHECK(bytes.size * bytes.itemsize == sizeof(jaxserve::LaunchTicket) && PyBuffer_IsContiguous(bytes.view(), 'C'),
                 "set_current_launch",
                 "wanted 64 contiguous bytes, got " + std::to_string(bytes.size * bytes.itemsize));
  jaxserve::current_launch() = jaxserve::LaunchTicket::load(bytes.ptr);
}

py::dict as_dict(const std::map<std::string, jaxserve::Durations>& by_kind) {
  py::dict found;
  for (const auto& [kind, durations] : by_kind) {
    py::dict entry;
    entry["counts"] = durations.counts;
    entry["total_ns"] = durations.total_ns;
    found[kind.c_str()] = entry;
  }
  return found;
}

// A stream runs what is queued before it goes, and that may need a Python thread to get on.
struct DeleteWithoutGil {
  void operator()(twin::Stream* stream) const {
    py::gil_scoped_release release;
    delete stream;
  }
};

// See jaxserve/barrier/journal.py.
void bind_journal(py::module_& m) {
  auto journal = m.def_submodule("journal", "What happened to shared rows, in order. Off by default.");
#ifndef JAXSERVE_CUDA
  journal.def("start", [](std::size_t capacity) { Journal::instance().start(capacity); }, py::arg("capacity"));
#endif
  journal.def("stop", [] { Journal::instance().stop(); });
  journal.def("is_on", [] { return Journal::instance().is_on(); });
  journal.def(
      "drain",
      [] {
        std::vector<jaxserve::JournalEntry> entries;
        const uint64_t num_dropped = Journal::instance().drain(entries);
        const auto* bytes = reinterpret_cast<const char*>(entries.data());
        return py::make_tuple(py::bytes(bytes, entries.size() * sizeof(jaxserve::JournalEntry)), num_dropped);
      },
      "(entries since the last call, 48 bytes each; how many found no room).");
  journal.def("next_id", [] { return Journal::instance().next_id(); });
  journal.def("names", [] { return Journal::instance().names(); });
  journal.def("intern", [](const std::string& text) { return Journal::instance().intern(text); }, py::arg("text"));
  journal.def("strings", [] { return Journal::instance().strings(); });
  journal.def("set_origin", [](uint32_t origin) { Journal::current_origin() = origin; }, py::arg("origin"));
  journal.def(
      "append",
      [](uint32_t kind, uint64_t subject, uint64_t a, uint64_t b, uint32_t origin) {
        Journal::instance().append(static_cast<jaxserve::JournalKind>(kind), subject, a, b, origin);
      },
      py::arg("kind"), py::arg("subject"), py::arg("a") = 0, py::arg("b") = 0, py::arg("origin") = 0);
}

using Rows = py::array_t<int32_t, py::array::c_style>;

// Values are [rows, columns] (or [rows] for one column) of the buffer's own type; nothing is converted silently.
void write_rows(twin::Stream& stream, const std::shared_ptr<twin::SharedBuffer>& buffer, const Rows& rows,
                const py::array& values, int64_t first_column) {
  const py::dtype wanted = buffer->is_float() ? py::dtype::of<float>() : py::dtype::of<int32_t>();
  const std::string operation = "Stream.write_rows";
  JAXSERVE_CHECK(values.dtype().is(wanted) || values.dtype().equal(wanted), operation,
                 "wanted values of dtype " + py::str(wanted).cast<std::string>() + ", got " +
                     py::str(values.dtype()).cast<std::string>());
  JAXSERVE_CHECK(rows.ndim() == 1 && (values.ndim() == 1 || values.ndim() == 2) && values.shape(0) == rows.shape(0),
                 operation, "wanted rows [n] and values [n] or [n, columns]");
  JAXSERVE_CHECK((values.flags() & py::array::c_style) != 0, operation, "values must be C-contiguous");
  const int64_t num_values = values.ndim() == 1 ? 1 : values.shape(1);
  const int32_t* row_data = rows.data();
  const void* value_data = values.data();
  const int64_t num_rows = rows.shape(0);
  py::gil_scoped_release release;
  stream.write_rows(buffer, row_data, num_rows, first_column, value_data, num_values);
}

// A trie takes numpy arrays as they are: converting other types would hide mistakes, and copy.
Rows checked_tokens(const std::string& operation, const py::handle& tokens) {
  const bool is_array = py::isinstance<py::array>(tokens);
  const auto array = is_array ? py::reinterpret_borrow<py::array>(tokens) : py::array();
  JAXSERVE_CHECK(is_array && Rows::check_(array) && array.ndim() == 1, operation,
                 "wanted tokens as a contiguous int32 array [n], got " +
                     (is_array ? py::str(array.dtype()).cast<std::string>() + " with " +
                                     std::to_string(array.ndim()) + " dimensions"
                               : py::str(py::type::handle_of(tokens)).cast<std::string>()));
  return py::reinterpret_borrow<Rows>(array);
}

py::tuple match(NgramTrie& trie, const py::handle& context, int32_t num_nodes) {
  const Rows tokens = checked_tokens("NgramTrie.match", context);
  std::vector<int32_t> drafts(std::max(0, num_nodes));
  std::vector<int32_t> parents(drafts.size());
  NgramTrie::Match found;
  {
    const int32_t* data = tokens.data();
    const int64_t length = tokens.size();
    py::gil_scoped_release release;
    found = trie.match(data, length, num_nodes, drafts.data(), parents.data());
  }
  return py::make_tuple(Rows(found.num_drafts, drafts.data()), Rows(found.num_drafts, parents.data()),
                        found.match_length);
}

py::tuple match_batch(NgramTrie& trie, const py::list& contexts, int32_t num_nodes) {
  JAXSERVE_CHECK(num_nodes >= 0, "NgramTrie.match_batch", "wanted num_nodes from 0, got " + std::to_string(num_nodes));
  std::vector<Rows> held;  // while the lock of the interpreter is not
  std::vector<std::pair<const int32_t*, int64_t>> views;
  for (const py::handle context : contexts) {
    held.push_back(checked_tokens("NgramTrie.match_batch", context));
    views.emplace_back(held.back().data(), held.back().size());
  }
  const auto num_contexts = static_cast<py::ssize_t>(views.size());
  Rows drafts({num_contexts, static_cast<py::ssize_t>(num_nodes)});
  Rows parents({num_contexts, static_cast<py::ssize_t>(num_nodes)});
  Rows counts(num_contexts);
  Rows match_lengths(num_contexts);
  int32_t* row = drafts.mutable_data();
  int32_t* parent_row = parents.mutable_data();
  std::fill_n(row, drafts.size(), 0);
  std::fill_n(parent_row, parents.size(), 0);
  int32_t* count = counts.mutable_data();
  int32_t* match_length = match_lengths.mutable_data();
  {
    py::gil_scoped_release release;
    for (const auto& [data, length] : views) {
      const NgramTrie::Match found = trie.match(data, length, num_nodes, row, parent_row);
      *count++ = found.num_drafts;
      *match_length++ = found.match_length;
      row += num_nodes;
      parent_row += num_nodes;
    }
  }
  return py::make_tuple(drafts, parents, counts, match_lengths);
}

void append(NgramTrie& trie, const py::handle& context, std::optional<int64_t> num_new) {
  const Rows tokens = checked_tokens("NgramTrie.append", context);
  const int32_t* data = tokens.data();
  const int64_t length = tokens.size();
  py::gil_scoped_release release;
  trie.append(data, length, num_new.value_or(length));
}

// Local: both twins bind this one class, and may be loaded together.
void bind_ngram_trie(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<NgramTrie>(m, "NgramTrie", py::module_local())
      .def(py::init([](int64_t capacity, int64_t max_depth, int64_t max_match, int64_t min_breadth,
                       int64_t max_breadth, const std::string& mode) {
             return std::make_unique<NgramTrie>(
                 NgramTrie::Options{capacity, max_depth, max_match, min_breadth, max_breadth, mode});
           }),
           py::arg("capacity"), py::arg("max_depth") = 18, py::arg("max_match") = 12, py::arg("min_breadth") = 1,
           py::arg("max_breadth") = 10, py::arg("mode") = "bfs")
      .def("append", [](NgramTrie& trie, const py::handle& context, int64_t n) { append(trie, context, n); },
           py::arg("context"), py::arg("num_new"))
      .def("load", [](NgramTrie& trie, const py::handle& tokens) { append(trie, tokens, std::nullopt); },
           py::arg("tokens"))
      .def("match", &match, py::arg("context"), py::arg("num_nodes"))
      .def("match_batch", &match_batch, py::arg("contexts"), py::arg("num_nodes"))
      .def("count",
           [](NgramTrie& trie, const py::handle& tokens) {
             const Rows checked = checked_tokens("NgramTrie.count", tokens);
             const int32_t* data = checked.data();
             const int64_t length = checked.size();
             py::gil_scoped_release release;
             return trie.count(data, length);
           },
           py::arg("tokens"))
      .def("clear", &NgramTrie::clear, no_gil)
      .def("check_integrity", &NgramTrie::check_integrity, no_gil)
      .def_property_readonly("num_nodes", py::cpp_function(&NgramTrie::num_nodes, no_gil))
      .def_property_readonly("num_evictions", py::cpp_function(&NgramTrie::num_evictions, no_gil))
      .def_property_readonly("capacity", &NgramTrie::capacity);
}

}  // namespace

PYBIND11_MODULE(JAXSERVE_MODULE, m) {
  m.doc() = "Streams, event rings, shared buffers and XLA FFI handlers of one platform.";
  m.attr("platform") = JAXSERVE_PLATFORM;
  m.attr("ffi_api_minor") = XLA_FFI_API_MINOR;
  m.attr("ticket_bytes") = sizeof(jaxserve::LaunchTicket);

  // Local: both twins throw the same C++ types, and a global translation would raise the other module's errors.
  py::register_local_exception<jaxserve::NativeError>(m, "NativeError", PyExc_RuntimeError);
  py::register_local_exception<jaxserve::WaitTimeout>(m, "WaitTimeout", m.attr("NativeError").ptr());
  py::register_local_exception<jaxserve::InjectedFault>(m, "InjectedFault", m.attr("NativeError").ptr());

  py::class_<twin::SharedBuffer, std::shared_ptr<twin::SharedBuffer>>(m, "SharedBuffer")
      .def(py::init<int64_t, int64_t, bool, const std::string&>(), py::arg("num_rows"), py::arg("num_columns"),
           py::arg("is_float"), py::arg("name") = "buffer")
      .def_property_readonly("id", &twin::SharedBuffer::id)
      .def_property_readonly("num_rows", &twin::SharedBuffer::num_rows)
      .def_property_readonly("num_columns", &twin::SharedBuffer::num_columns)
      .def_property_readonly("address",
                             [](twin::SharedBuffer& b) { return reinterpret_cast<uintptr_t>(b.data()); })
      .def("__dlpack__", [](twin::SharedBuffer& b, const py::args&, const py::kwargs&) { return export_dlpack(b); })
      .def("__dlpack_device__",
           [](twin::SharedBuffer&) { return py::make_tuple(twin::SharedBuffer::kDeviceType, 0); });

  py::class_<twin::EventRing, std::shared_ptr<twin::EventRing>>(m, "EventRing")
      .def(py::init<std::string, int>(), py::arg("name"), py::arg("num_slots"))
      .def("reserve", &twin::EventRing::reserve)
      .def("record", &twin::EventRing::record, py::arg("generation"))
      .def("abandon", &twin::EventRing::abandon, py::arg("generation"))
      .def(
          "sync",
          [](twin::EventRing& ring, uint64_t generation, double timeout_s) { return ring.wait(generation, timeout_s); },
          py::arg("generation"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def("is_done", &twin::EventRing::is_done, py::arg("generation"))
#ifdef JAXSERVE_CUDA
      .def("mirror_for_graphs", &twin::EventRing::mirror_for_graphs)
      .def("note_graph_record", &twin::EventRing::note_graph_record, py::arg("generation"))
#endif
      .def_property_readonly("newest_reserved", &twin::EventRing::newest_reserved)
      .def_property_readonly("newest_recorded", &twin::EventRing::newest_recorded)
      .def_property_readonly("id", &twin::EventRing::id)
      .def_property_readonly("num_owed", &twin::EventRing::num_owed)
      .def_property_readonly("num_waiters", &twin::EventRing::num_waiters)
      .def_property_readonly("name", &twin::EventRing::name);

  py::class_<twin::Stream, std::unique_ptr<twin::Stream, DeleteWithoutGil>>(m, "Stream")
      .def(py::init<int, int64_t, double, bool, const std::string&>(), py::arg("num_staging_blocks"),
           py::arg("staging_block_bytes"), py::arg("wait_timeout_s"), py::arg("staging_guarded") = true,
           py::arg("name") = "stream")
      .def_property_readonly("id", &twin::Stream::id)
      .def_property_readonly("staging_id", &twin::Stream::staging_id)
      .def("write_rows", &write_rows, py::arg("buffer").none(false), py::arg("rows"), py::arg("values"),
           py::arg("first_column") = 0)
      // Without the GIL: on CUDA the wait blocks until another thread may have dispatched the launch that it names.
      .def("wait", &twin::Stream::wait, py::arg("ring").none(false), py::arg("generation"), py::arg("kind") = "other",
           py::call_guard<py::gil_scoped_release>())
      .def("record", &twin::Stream::record, py::arg("ring").none(false), py::arg("generation"),
           py::call_guard<py::gil_scoped_release>())
      .def("sync", &twin::Stream::sync, py::call_guard<py::gil_scoped_release>())
      .def("is_done", &twin::Stream::is_done)
      .def("reset", &twin::Stream::reset)
      .def_property_readonly("error", &twin::Stream::error)
      .def("stats", [](twin::Stream& stream) {
        const auto stats = stream.stats();
        py::dict d;
        d["num_copies"] = stats.num_copies;
        d["bytes_copied"] = stats.bytes_copied;
        d["num_waits"] = stats.num_waits;
        d["wait_ns"] = stats.wait_ns;
        d["staging_wait_ns"] = stats.staging_wait_ns;
        d["num_staging_in_use"] = stats.num_staging_in_use;
        d["waits"] = as_dict(stats.waits);
        d["held_up"] = as_dict(stats.held_up);
        return d;
      });

  m.def(
      "open_channel",
      [](std::shared_ptr<twin::EventRing> write_done, std::shared_ptr<twin::EventRing> read_done,
         std::shared_ptr<twin::EventRing> step_done, double wait_timeout_s) {
        auto channel = std::make_shared<twin::Channel>();
        channel->write_done = std::move(write_done);
        channel->read_done = std::move(read_done);
        channel->step_done = std::move(step_done);
        channel->wait_timeout_s = wait_timeout_s;
        return twin::open_channel(std::move(channel));
      },
      py::arg("write_done").none(false), py::arg("read_done").none(false), py::arg("step_done").none(false),
      py::arg("wait_timeout_s"));
  m.def("close_channel", &twin::close_channel, py::arg("number"));

  m.def("set_current_launch", &set_current_launch, py::arg("ticket"),
        "Leaves a launch ticket (64 bytes) for the handlers that this thread's next dispatch calls; zeros reset it. "
        "The CPU's handlers ignore it.");

#ifdef JAXSERVE_CUDA
  m.def(
      "take_row_error",
      [](uint64_t number) {
        const auto channel = twin::find_channel(number);
        return channel == nullptr ? std::nullopt : channel->take_row_error();
      },
      py::arg("channel"),
      "(position, row id) of the newest row id outside its table that a snapshot met since the last call, or None.");
  m.def("compute_stream", [] { return reinterpret_cast<uintptr_t>(twin::compute_stream()); },
        "Address of XLA's compute stream; 0 before a program with the target jaxserve_compute_stream has run.");
  m.def("record_on_compute_stream", &twin::record_on_compute_stream, py::arg("ring").none(false), py::arg("generation"),
        py::call_guard<py::gil_scoped_release>());
  m.def("wait_on_compute_stream", &twin::wait_on_compute_stream, py::arg("ring").none(false), py::arg("generation"),
        py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>());
  twin::decoder::bind(m);
#endif

  m.def("handlers", [] {
    py::dict handlers;
    for (const auto& [name, function] : twin::handlers()) {
      handlers[name.c_str()] = py::capsule(reinterpret_cast<void*>(function));
    }
    return handlers;
  }, "XLA FFI target name -> capsule of its typed handler.");

  bind_ngram_trie(m);
  bind_journal(m);
  m.def("live_objects", [] {
    py::dict counts;
    for (std::size_t kind = 0; kind < jaxserve::kObjectKindNames.size(); ++kind) {
      counts[jaxserve::kObjectKindNames[kind]] = jaxserve::live_objects(static_cast<jaxserve::ObjectKind>(kind)).load();
    }
    return counts;
  }, "How many native objects of each kind are alive.");

  auto faults = m.def_submodule("faults", "Fault injection for tests: makes the n-th operation of a kind fail.");
  faults.def("fail_nth",
             [](const std::string& k, int64_t n, int64_t times) { Faults::instance().fail_nth(k, n, times); },
             py::arg("kind"), py::arg("n"), py::arg("times") = 1);
  faults.def("clear", [] { Faults::instance().clear(); });
  faults.def("passes", [](const std::string& k) { return Faults::instance().passes(k); }, py::arg("kind"));
  faults.def("failures", [](const std::string& k) { return Faults::instance().failures(k); }, py::arg("kind"));
  faults.def("pass_through", [](const std::string& k, const std::string& place) {
    Faults::instance().pass(k.c_str(), place.c_str());
  }, py::arg("kind"), py::arg("place"));

  auto hold = m.def_submodule("hold_points", "Stalls for tests: delays and gates at named places.");
  hold.def("delay", [](const std::string& n, int64_t us) { HoldPoints::instance().delay(n, us); }, py::arg("name"),
           py::arg("microseconds"));
  hold.def("close", [](const std::string& n) { HoldPoints::instance().close(n); }, py::arg("name"));
  hold.def("open", [](const std::string& n) { HoldPoints::instance().open(n); }, py::arg("name"));
  hold.def("clear", [] { HoldPoints::instance().clear(); });
  hold.def("hits", [](const std::string& n) { return HoldPoints::instance().hits(n); }, py::arg("name"));
  hold.def("pass_through", [](const std::string& n) { HoldPoints::instance().pass(n.c_str()); }, py::arg("name"),
           py::call_guard<py::gil_scoped_release>());
}
