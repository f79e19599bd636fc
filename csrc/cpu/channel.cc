#include "cpu/channel.h"

#include <map>
#include <mutex>
#include <utility>

#include "common/faults.h"

namespace jaxserve::cpu {
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

}  // namespace jaxserve::cpu
