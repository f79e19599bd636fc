#include "call_frame.h"

#include <memory>
#include <utility>

struct XLA_FFI_Error {
  std::string message;
};

namespace native_tests {

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::schedule(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void ThreadPool::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

namespace {

struct Context {
  ThreadPool* pool;
  void* stream;
};

Context& of(XLA_FFI_ExecutionContext* context) { return *reinterpret_cast<Context*>(context); }

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
    args->message = args->error->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = of(args->ctx).stream;
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
    of(args->ctx).pool->schedule([task = args->task, data = args->data] { task(data); });
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = of(args->ctx).pool->num_threads();
    return nullptr;
  };
  return api;
}

const XLA_FFI_Api& api() {
  static const XLA_FFI_Api instance = make_api();
  return instance;
}

XLA_FFI_Buffer as_buffer(Array& array) {
  return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
          array.dtype,                array.data,
          static_cast<int64_t>(array.dims.size()), array.dims.data()};
}

// Attributes in the form of the interface, sorted by name as it wants them.
class Attributes {
 public:
  explicit Attributes(const std::map<std::string, Attribute>& attributes) {
    for (const auto& [name, attribute] : attributes) {
      names_.push_back(std::make_unique<XLA_FFI_ByteSpan>(XLA_FFI_ByteSpan{name.data(), name.size()}));
      if (const auto* text = std::get_if<std::string>(&attribute)) {
        add(XLA_FFI_AttrType_STRING, std::make_shared<XLA_FFI_ByteSpan>(XLA_FFI_ByteSpan{text->data(), text->size()}));
      } else if (const auto* number = std::get_if<int64_t>(&attribute)) {
        add_scalar(XLA_FFI_DataType_S64, number);
      } else {
        add_scalar(XLA_FFI_DataType_F32, &std::get<float>(attribute));
      }
    }
    for (const auto& name : names_) name_pointers_.push_back(name.get());
  }

  XLA_FFI_Attrs view() {
    return {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,        static_cast<int64_t>(types_.size()),
            types_.data(),             name_pointers_.data(), values_.data()};
  }

 private:
  template <typename T>
  void add(XLA_FFI_AttrType type, std::shared_ptr<T> value) {
    types_.push_back(type);
    values_.push_back(value.get());
    kept_.push_back(std::move(value));
  }
  void add_scalar(XLA_FFI_DataType dtype, const void* value) {
    add(XLA_FFI_AttrType_SCALAR, std::make_shared<XLA_FFI_Scalar>(XLA_FFI_Scalar{dtype, const_cast<void*>(value)}));
  }

  std::vector<std::unique_ptr<XLA_FFI_ByteSpan>> names_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace

std::string call(XLA_FFI_Handler* handler, std::vector<Array> operands, std::vector<Array> results,
                 const std::map<std::string, Attribute>& attributes, ThreadPool* pool, void* stream) {
  Context context{pool, stream};
  std::vector<XLA_FFI_Buffer> buffers;
  buffers.reserve(operands.size() + results.size());
  std::vector<void*> arguments, returns;
  for (Array& operand : operands) arguments.push_back(&buffers.emplace_back(as_buffer(operand)));
  for (Array& result : results) returns.push_back(&buffers.emplace_back(as_buffer(result)));
  std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> return_types(returns.size(), XLA_FFI_RetType_BUFFER);
  Attributes attrs(attributes);

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api();
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&context);
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arguments.size()), argument_types.data(),
                arguments.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(returns.size()), return_types.data(),
                returns.data()};
  frame.attrs = attrs.view();
  const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error == nullptr ? "" : error->message;
}

}  // namespace native_tests
