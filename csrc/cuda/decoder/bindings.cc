#include "cuda/decoder/bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "cuda/decoder/captured_steps.h"

namespace py = pybind11;

namespace jaxserve::cuda::decoder {
namespace {

std::shared_ptr<CapturedSteps> opened(uint64_t number) {
  const auto found = find_captured_steps(number);
  JAXSERVE_CHECK(found != nullptr, "captured steps", "number " + std::to_string(number) + " is not open");
  return found;
}

py::dict counts_of(uint64_t number) {
  const auto steps = opened(number);
  const Counts counts = steps->counts();
  py::dict found;
  found["uncaptured"] = counts.uncaptured;
  found["captured"] = counts.captured;
  found["moved"] = counts.moved;
  found["replayed"] = counts.replayed;
  found["nodes"] = counts.nodes;
  found["capture_ns"] = counts.capture_ns;
  found["arena_bytes"] = steps->arena_bytes();
  return found;
}

}  // namespace

void bind(py::module_& parent) {
  auto m = parent.def_submodule("captured_steps", "CUDA graphs of decode and verify steps, see captured_steps.h.");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def(
      "open",
      [](const std::vector<std::string>& libraries) {
        return open_captured_steps(std::make_shared<CapturedSteps>(libraries));
      },
      py::arg("libraries"), no_gil, "Returns the number that programs name; libraries: where cuBLAS may be.");
  m.def("close", &close_captured_steps, py::arg("number"), no_gil);
  m.def(
      "reserve",
      [](uint64_t number, int batch, int queries, int vocab, int hidden, int inner, int heads, int kv_heads, int dim,
         int table_width, int splits, bool is_tree, int num_layers, int num_points) {
        Sizes sizes{};
        sizes.batch = batch, sizes.queries = queries, sizes.vocab = vocab, sizes.hidden = hidden;
        sizes.inner = inner, sizes.heads = heads, sizes.kv_heads = kv_heads, sizes.dim = dim;
        sizes.table_width = table_width, sizes.splits = splits, sizes.is_tree = is_tree;
        sizes.windows.assign(num_layers, 0);
        sizes.points.assign(num_points, 0);
        opened(number)->reserve(sizes);
      },
      py::arg("number"), py::kw_only(), py::arg("batch"), py::arg("queries"), py::arg("vocab"), py::arg("hidden"),
      py::arg("inner"), py::arg("heads"), py::arg("kv_heads"), py::arg("dim"), py::arg("table_width"),
      py::arg("splits"), py::arg("is_tree"), py::arg("num_layers"), py::arg("num_points"), no_gil,
      "Makes room for a step of these sizes.");
  m.def("counts", &counts_of, py::arg("number"),
        "uncaptured, captured, moved, replayed, nodes (of the newest graph), capture_ns, arena_bytes.");
  m.def(
      "time_replays",
      [](uint64_t number, int batch, int queries, int repeats) {
        return opened(number)->time_replays(batch, queries, repeats);
      },
      py::arg("number"), py::arg("batch"), py::arg("queries"), py::arg("repeats"), no_gil,
      "Milliseconds of one replay of the graph of such steps, the device otherwise idle; 0 if there is none.");
}

}  // namespace jaxserve::cuda::decoder
