// Paged attention for many query tokens per sequence: prompt chunks.
#pragma once

#include "cpu/attention_problem.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve::cpu {

// Whether a problem has enough query rows per KV head for `attend_prompt`; trees have not.
bool is_prompt(const Problem& p);

// Writes p.out. Raises std::bad_alloc.
void attend_prompt(xla::ffi::ThreadPool& pool, const Problem& p);

}  // namespace jaxserve::cpu
