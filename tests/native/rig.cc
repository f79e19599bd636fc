#include "rig.h"

#include <algorithm>
#include <utility>

namespace native_tests {

void write(twin::Stream& stream, const BufferPointer& buffer, const std::vector<int32_t>& rows, int32_t value) {
  const std::vector<int32_t> values(rows.size() * buffer->num_columns(), value);
  stream.write_rows(buffer, rows.data(), static_cast<int64_t>(rows.size()), 0, values.data(), buffer->num_columns());
}

Fences::Fences(double timeout_s, int num_slots)
    : write_done(make_ring("write_done", num_slots)),
      read_done(make_ring("read_done", num_slots)),
      step_done(make_ring("step_done", num_slots)) {
  auto channel = std::make_shared<twin::Channel>();
  channel->write_done = write_done;
  channel->read_done = read_done;
  channel->step_done = step_done;
  channel->wait_timeout_s = timeout_s;
  number = twin::open_channel(std::move(channel));
}

#ifdef JAXSERVE_CUDA
Executor::Executor() : stream_(new fake::Stream()) {}
Executor::~Executor() { delete static_cast<fake::Stream*>(stream_); }
void Executor::sync() { static_cast<fake::Stream*>(stream_)->sync(); }
#else
Executor::Executor() = default;
Executor::~Executor() = default;
void Executor::sync() {}
#endif

std::string Executor::snapshot(const LaunchTicket& ticket, const BufferPointer& buffer,
                               const std::vector<int32_t>& row_ids, std::vector<int32_t>& copy) {
  const auto num_rows = static_cast<int64_t>(row_ids.size());
  const int64_t columns = buffer->num_columns();
  copy.assign(num_rows * columns, -1);
  LaunchTicket operand = ticket;
  std::vector<int32_t> ids = row_ids, ids_copy(row_ids.size());
  jaxserve::current_launch() = ticket;
  const std::string error = call(twin::handlers().at("jaxserve_snapshot"),
                                 {{&operand, XLA_FFI_DataType_U32, {16}},
                                  {ids.data(), XLA_FFI_DataType_S32, {num_rows}},
                                  {buffer->data(), XLA_FFI_DataType_S32, {buffer->num_rows(), columns}}},
                                 {{ids_copy.data(), XLA_FFI_DataType_S32, {num_rows}},
                                  {copy.data(), XLA_FFI_DataType_S32, {num_rows, columns}}},
                                 {}, nullptr, stream_);
  jaxserve::current_launch() = LaunchTicket{};
  sync();  // the arrays are ours, and the results are about to be read
  return error;
}

std::string Executor::record_end(const LaunchTicket& ticket) {
  LaunchTicket operand = ticket;
  uint32_t zero = 1;
  jaxserve::current_launch() = ticket;
  const std::string error =
      call(twin::handlers().at("jaxserve_record_end"), {{&operand, XLA_FFI_DataType_U32, {16}}},
           {{&zero, XLA_FFI_DataType_U32, {1}}}, {}, nullptr, stream_);
  jaxserve::current_launch() = LaunchTicket{};
  sync();
  CHECK(!error.empty() || zero == 0);
  return error;
}

NothingLeft::NothingLeft() {
  for (std::size_t kind = 0; kind < jaxserve::kObjectKindNames.size(); ++kind) {
    before_.push_back(jaxserve::live_objects(static_cast<jaxserve::ObjectKind>(kind)));
  }
}

void NothingLeft::check() {
  Faults::instance().clear();
  HoldPoints::instance().clear();
  for (std::size_t kind = 0; kind < before_.size(); ++kind) {
    const int64_t now = jaxserve::live_objects(static_cast<jaxserve::ObjectKind>(kind));
    if (now != before_[kind]) {
      fail(__FILE__, __LINE__, std::to_string(now - before_[kind]) + " of kind " + jaxserve::kObjectKindNames[kind] +
                                   " are still alive");
    }
  }
}

void Threads::start(std::function<void()> body) {
  threads_.emplace_back([this, body = std::move(body)] {
    try {
      body();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failure_ == nullptr) failure_ = std::current_exception();
    }
  });
}

void Threads::wait() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Threads::join() {
  wait();
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace native_tests

int main(int num_arguments, char** arguments) {
  using native_tests::tests;
  int num_failed = 0, num_run = 0;
  for (const native_tests::Test& test : tests()) {
    const std::string name = test.name;
    bool wanted = num_arguments < 2;
    for (int i = 1; i < num_arguments; ++i) wanted |= name.find(arguments[i]) != std::string::npos;
    if (!wanted) continue;
    ++num_run;
    std::string failure;
    native_tests::NothingLeft nothing_left;
    try {
      test.body();
      nothing_left.check();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    jaxserve::Faults::instance().clear();
    jaxserve::HoldPoints::instance().clear();
    if (failure.empty()) continue;
    ++num_failed;
    std::printf("FAILED %s: %s\n", test.name, failure.c_str());
  }
  std::printf("%d tests, %d failed\n", num_run, num_failed);
  return num_failed > 0 || num_run == 0 ? 1 : 0;
}
