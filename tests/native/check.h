// Forty lines of test harness: TEST(name) registers a body, CHECK raises with file and line, run_tests runs them.
#pragma once

#include <cstdio>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace native_tests {

struct Test {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body) { tests().push_back({name, std::move(body)}); }
};

class CheckFailed : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream message;
  message << file << ":" << line << ": " << what;
  throw CheckFailed(message.str());
}

}  // namespace native_tests

#define TEST(name)                                                   \
  static void test_##name();                                         \
  static ::native_tests::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) ::native_tests::fail(__FILE__, __LINE__, "wanted " #condition); \
  } while (0)

// The statement must raise `type`, and its message must contain `text`.
#define CHECK_RAISES(statement, type, text)                                                                       \
  do {                                                                                                            \
    bool raised = false;                                                                                          \
    try {                                                                                                         \
      statement;                                                                                                  \
    } catch (const type& error) {                                                                                 \
      raised = true;                                                                                              \
      if (std::string(error.what()).find(text) == std::string::npos) {                                            \
        ::native_tests::fail(__FILE__, __LINE__, std::string("wanted \"") + (text) + "\" in \"" + error.what() + "\""); \
      }                                                                                                           \
    }                                                                                                             \
    if (!raised) ::native_tests::fail(__FILE__, __LINE__, #statement " raised no " #type);                        \
  } while (0)
