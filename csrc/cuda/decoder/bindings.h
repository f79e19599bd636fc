// The Python side of captured steps.
#pragma once

#include <pybind11/pybind11.h>

namespace jaxserve::cuda::decoder {

void bind(pybind11::module_& m);

}  // namespace jaxserve::cuda::decoder
