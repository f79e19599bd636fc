// Every CUDA runtime call of this twin goes through one of these macros; a test scans the sources for one that does not.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <string>

#include "common/check.h"

namespace jaxserve::cuda {

// "cudaMalloc(&data, bytes)" -> "cudaMalloc": the arguments say nothing to who reads the message.
inline std::string called_function(const char* call) {
  const std::string text(call);
  return text.substr(0, text.find('('));
}

inline std::string describe(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

inline std::string failure(const char* file, int line, const char* call, cudaError_t error) {
  return located(file, line, called_function(call), describe(error));
}

inline void check(cudaError_t error, const char* file, int line, const char* call) {
  if (error != cudaSuccess) throw NativeError(failure(file, line, call, error));
}

inline bool query(cudaError_t error, const char* file, int line, const char* call) {
  if (error == cudaErrorNotReady) return false;
  check(error, file, line, call);
  return true;
}

inline void report(cudaError_t error, const char* file, int line, const char* call) noexcept {
  // The driver may be gone before our statics and Python's last references are: nothing is left to release then.
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  std::fprintf(stderr, "jaxserve: %s\n", failure(file, line, call, error).c_str());
}

}  // namespace jaxserve::cuda

// Raises NativeError "file:line: cudaX failed: reason" unless the call succeeds.
#define JAXSERVE_CUDA_CHECK(call) ::jaxserve::cuda::check((call), __FILE__, __LINE__, #call)
// For cudaEventQuery and cudaStreamQuery: true when done, false when not yet, NativeError on anything else.
#define JAXSERVE_CUDA_QUERY(call) ::jaxserve::cuda::query((call), __FILE__, __LINE__, #call)
// For destructors, which must not throw: writes the failure to stderr.
#define JAXSERVE_CUDA_REPORT(call) ::jaxserve::cuda::report((call), __FILE__, __LINE__, #call)
