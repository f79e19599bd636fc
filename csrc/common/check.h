// Errors raised by csrc: always "file:line: operation failed: reason".
#pragma once

#include <stdexcept>
#include <string>

namespace jaxserve {

// Any failure of a native operation. Crosses into Python as jaxserve's NativeError.
class NativeError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A wait ran out of time; the message gives the generation wanted and the newest one found.
class WaitTimeout : public NativeError {
 public:
  using NativeError::NativeError;
};

inline std::string located(const char* file, int line, const std::string& operation, const std::string& reason) {
  const std::string path(file);
  const auto slash = path.find_last_of('/');
  const std::string base = slash == std::string::npos ? path : path.substr(slash + 1);
  return base + ":" + std::to_string(line) + ": " + operation + " failed: " + reason;
}

}  // namespace jaxserve

// Raises NativeError unless `condition` holds.
#define JAXSERVE_CHECK(condition, operation, reason)                                             \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      throw ::jaxserve::NativeError(::jaxserve::located(__FILE__, __LINE__, operation, reason)); \
    }                                                                                            \
  } while (0)
