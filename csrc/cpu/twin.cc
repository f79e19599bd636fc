#include "cpu/twin.h"

extern "C" {
XLA_FFI_Error* jaxserve_cpu_snapshot(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cpu_record_end(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cpu_hold(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cpu_note(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cpu_paged_attention(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cpu_skinny_matmul(XLA_FFI_CallFrame*);
}

namespace jaxserve::cpu {

std::map<std::string, XLA_FFI_Handler*> handlers() {
  return {
      {"jaxserve_snapshot", jaxserve_cpu_snapshot},
      {"jaxserve_record_end", jaxserve_cpu_record_end},
      {"jaxserve_hold", jaxserve_cpu_hold},
      {"jaxserve_note", jaxserve_cpu_note},
      {"jaxserve_paged_attention", jaxserve_cpu_paged_attention},
      {"jaxserve_skinny_matmul", jaxserve_cpu_skinny_matmul},
  };
}

}  // namespace jaxserve::cpu
