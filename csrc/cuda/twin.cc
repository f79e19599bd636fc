#include "cuda/twin.h"

extern "C" {
XLA_FFI_Error* jaxserve_cuda_snapshot(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_snapshot_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_record_end(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_record_end_graph(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_hold(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_compute_stream(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_paged_attention_bf16(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxserve_cuda_captured_step(XLA_FFI_CallFrame*);
}

namespace jaxserve::cuda {

std::map<std::string, XLA_FFI_Handler*> handlers() {
  return {
      {"jaxserve_snapshot", jaxserve_cuda_snapshot},
      {"jaxserve_snapshot_graph", jaxserve_cuda_snapshot_graph},
      {"jaxserve_record_end", jaxserve_cuda_record_end},
      {"jaxserve_record_end_graph", jaxserve_cuda_record_end_graph},
      {"jaxserve_hold", jaxserve_cuda_hold},
      {"jaxserve_compute_stream", jaxserve_cuda_compute_stream},
      {"jaxserve_paged_attention_bf16", jaxserve_cuda_paged_attention_bf16},
      {"jaxserve_captured_step", jaxserve_cuda_captured_step},
  };
}

}  // namespace jaxserve::cuda
