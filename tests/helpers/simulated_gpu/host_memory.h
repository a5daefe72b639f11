// Page-locked memory of the host: torch's own, which lives until its copies are done, and registered one, which does not.
#pragma once

#include "memory.h"

namespace simulated {

inline std::map<uintptr_t, size_t> pinned, registered;  // by torch's allocator; by cudaHostRegister

inline bool is_within(const std::map<uintptr_t, size_t>& ranges, const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges.upper_bound(address);
  return after != ranges.begin() && address < std::prev(after)->first + std::prev(after)->second;
}
inline bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  return is_within(pinned, pointer) || is_within(registered, pointer);
}

inline void free_pinned(void* memory) {
  Lock lock(mutex);
  pinned.erase(reinterpret_cast<uintptr_t>(memory));
  std::free(memory);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    if (!asked) return {nullptr, nullptr, &free_pinned, Device(DeviceType::CPU)};
    size_t size = 512;
    while (size < asked) size *= 2;  // as torch's own (2.13)
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, PAGE, size) == 0, "simulated GPU: no page-locked memory is left");
    std::memset(memory, 0xff, asked);
    Lock lock(mutex);
    pinned[reinterpret_cast<uintptr_t>(memory)] = size;
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
inline PinnedAllocator pinned_allocator;

// CUDA's codes: 712 already registered, 713 not registered.
inline int register_host(uintptr_t address, size_t size) {
  Lock lock(mutex);
  for (auto& [other, bytes] : registered) if (address < other + bytes && other < address + size) return 712;
  registered[address] = size;
  return 0;
}
inline int unregister_host(uintptr_t address) {
  auto here = stack();
  {
    Lock lock(mutex);
    auto found = registered.find(address);
    if (found == registered.end()) return 713;
    for (auto& copy : late_copies)
      if (copy.host_begin < address + found->second && address < copy.host_end)
        reports.push_back({"USE of host memory that is unregistered before a copy of it has ended", here, nullptr});
    std::erase_if(late_copies, [&](const LateCopy& copy) {
      return copy.host_begin < address + found->second && address < copy.host_end;
    });
    registered.erase(found);
  }
  write_reports();
  return 0;
}

}  // namespace simulated
