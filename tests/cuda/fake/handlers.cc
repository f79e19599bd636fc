// The real handlers, callable from programs on the CPU: they get the fake compute stream where XLA's would be.
#include "runtime.h"
#include "xla/ffi/api/c_api.h"

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

namespace {

XLA_FFI_Error* give_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = fake::compute_stream();
  return nullptr;
}

bool sync_after = true;

XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  // While XLA asks for the handler's metadata there is no stream, and nothing to replace.
  const bool executes = frame->api != nullptr && frame->ctx != nullptr;
  if (!executes) return handler(frame);
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = give_stream;
  XLA_FFI_CallFrame copy = *frame;
  copy.api = &api;
  XLA_FFI_Error* error = handler(&copy);
  // The program reads the results right away: it does not run on the fake stream.
  if (sync_after && !fake::of(fake::compute_stream()).capturing) fake::of(fake::compute_stream()).sync();
  return error;
}

}  // namespace

extern "C" {

// Off: a handler's results are not complete when the program goes on, so only fences may be looked at.
__attribute__((visibility("default"))) void fake_sync_after_handlers(int on) { sync_after = on != 0; }

#define EXPORT(name) \
  __attribute__((visibility("default"))) XLA_FFI_Error* fake_##name(XLA_FFI_CallFrame* frame) { \
    return call(jaxserve_cuda_##name, frame); \
  }
EXPORT(snapshot)
EXPORT(snapshot_graph)
EXPORT(record_end)
EXPORT(record_end_graph)
EXPORT(hold)
EXPORT(compute_stream)
EXPORT(paged_attention_bf16)
EXPORT(captured_step)
}
