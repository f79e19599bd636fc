#include "cuda/channel.h"

#include <map>
#include <mutex>

#include "common/faults.h"
#include "cuda/check_cuda.h"

namespace jaxserve::cuda {
namespace {

struct Registry {
  std::mutex mutex;
  uint64_t newest = 0;                                    // guarded by mutex
  std::map<uint64_t, std::shared_ptr<Channel>> channels;  // guarded by mutex
};

Registry& registry() {
  static Registry* instance = new Registry();  // never destroyed: executions may outlive static destruction
  return *instance;
}

}  // namespace

Channel::Channel() {
  Faults::instance().pass("allocate", "Channel");
  void* word = nullptr;
  JAXSERVE_CUDA_CHECK(cudaHostAlloc(&word, sizeof(*row_error), cudaHostAllocMapped | cudaHostAllocPortable));
  row_error = static_cast<unsigned long long*>(word);
  *row_error = 0;
}

Channel::~Channel() { JAXSERVE_CUDA_REPORT(cudaFreeHost(row_error)); }

std::optional<std::pair<int64_t, int32_t>> Channel::take_row_error() {
  const unsigned long long word = __atomic_exchange_n(row_error, 0, __ATOMIC_ACQ_REL);
  if (word == 0) return std::nullopt;
  return std::make_pair(static_cast<int64_t>(word >> 32) - 1, static_cast<int32_t>(word & 0xffffffffu));
}

uint64_t open_channel(std::shared_ptr<Channel> channel) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  Faults::instance().pass("allocate", "open_channel");
  registry().channels[++registry().newest] = std::move(channel);
  return registry().newest;
}

void close_channel(uint64_t number) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().channels.erase(number);
}

std::shared_ptr<Channel> find_channel(uint64_t number) {
  if (number == 0) return nullptr;
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().channels.find(number);
  return found == registry().channels.end() ? nullptr : found->second;
}

}  // namespace jaxserve::cuda
