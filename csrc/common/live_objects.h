// Counts the native objects that are alive, by kind: counted before and after, they show what leaks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace jaxserve {

enum class ObjectKind : std::size_t { kSharedBuffer, kExport, kEventRing, kStream, kChannel, kCapturedSteps };

constexpr std::array<const char*, 6> kObjectKindNames = {"SharedBuffer", "export",  "EventRing",
                                                         "Stream",       "Channel", "CapturedSteps"};

inline std::atomic<int64_t>& live_objects(ObjectKind kind) {
  static std::array<std::atomic<int64_t>, kObjectKindNames.size()> counts{};
  return counts[static_cast<std::size_t>(kind)];
}

// A member that counts its owner, one whose constructor throws behind it included.
template <ObjectKind kKind>
class LiveObject {
 public:
  LiveObject() { live_objects(kKind).fetch_add(1, std::memory_order_relaxed); }
  ~LiveObject() { live_objects(kKind).fetch_sub(1, std::memory_order_relaxed); }
  LiveObject(const LiveObject&) = delete;
  LiveObject& operator=(const LiveObject&) = delete;
};

}  // namespace jaxserve
