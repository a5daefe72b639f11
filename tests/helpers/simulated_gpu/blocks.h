// Addresses and blocks of the simulated devices' memory, and who has read or written them.
//
// A device's addresses are a mapping without access, so that host code that reads through one dies at once; kernels use
// a second mapping at a constant distance. What is given out is filled with 0xFF, which is NaN in every float type.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <signal.h>
#include <sys/mman.h>

#include <list>
#include <map>

#include "order.h"

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr size_t ADDRESSES = 1ull << 39;  // of a device
constexpr size_t MIB = 1ull << 20;
constexpr size_t PAGE = 4096;

// Bytes of a device: SIMULATED_GPU_MIB is a number for all of them, or one for each, by commas.
inline size_t limit(int device) {
  const char* given = std::getenv("SIMULATED_GPU_MIB");
  std::istringstream list(given ? given : "4096");
  std::string name, last;
  for (int number = 0; number <= visible_devices().at(device) && std::getline(list, name, ','); number++) last = name;
  return std::stoull(last) * MIB;
}

struct Access {
  uintptr_t begin, end;
  int stream;
  Time time;
  bool is_write;
  std::string op;
  Stack stack;
};

// A piece of a segment, the addresses of a stream's small or large blocks; its neighbours there are `before` and `after`.
struct Block {
  uintptr_t address;
  size_t size, asked;
  int device, stream;
  bool is_small, in_use, is_mapped = true;
  Block *before = nullptr, *after = nullptr;
  std::set<int> users;  // other streams, by record_stream
  Clock used_until;
  std::list<Access> log;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};

struct DeviceMemory {
  uintptr_t base = 0;
  size_t next = 0;
  std::map<std::pair<int, bool>, uintptr_t> segments;  // by stream, and whether for small blocks
  std::set<Block*, BySize> free_small, free_large;     // mapped ones
  std::list<Block*> waiting;  // freed, while another stream may still use them
  c10::CachingDeviceAllocator::DeviceStats stats;

  std::set<Block*, BySize>& free(bool is_small) { return is_small ? free_small : free_large; }
};
inline std::vector<DeviceMemory> memories;
inline std::map<uintptr_t, Block*> blocks;
inline uintptr_t first_address = 0, distance = 0;

inline bool on_device(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  return address >= first_address && address < first_address + ADDRESSES * memories.size();
}
// Where kernels find the memory of a device's address.
inline void* reachable(const void* pointer) {
  return pointer ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + distance) : nullptr;
}
inline void* reachable(uintptr_t address) { return reachable(reinterpret_cast<void*>(address)); }

inline struct sigaction other_handler;
inline void on_segmentation_fault(int signal, siginfo_t* info, void*) {
  if (on_device(info->si_addr)) {
    const char text[] = "simulated GPU: host code read or wrote device memory by its address\n";
    if (write(2, text, sizeof text - 1) < 0) _exit(139);
  }
  sigaction(signal, &other_handler, nullptr);  // the same instruction faults again, for the handler before
}

inline void map_memory() {
  auto map = [&](int access) {
    return mmap(nullptr, ADDRESSES * MOST_DEVICES, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  memories.resize(MOST_DEVICES);
  void *addresses = map(PROT_NONE), *memory = map(PROT_READ | PROT_WRITE);
  TORCH_CHECK(addresses != MAP_FAILED && memory != MAP_FAILED, "simulated GPU: no addresses are left");
  first_address = reinterpret_cast<uintptr_t>(addresses);
  distance = reinterpret_cast<uintptr_t>(memory) - first_address;
  for (int device = 0; device < MOST_DEVICES; device++) {
    memories[device].base = first_address + ADDRESSES * device;
    streams.push_back({device, {}});
  }
  struct sigaction handler = {};
  handler.sa_sigaction = on_segmentation_fault;
  handler.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &handler, &other_handler);
}

// ---- accesses -------------------------------------------------------------------------------------------------

inline Block* block_of(uintptr_t address) {
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return address < block->address + block->size ? block : nullptr;
}

inline void report_race(const Block& block, const Access& now, const Access& before) {
  std::ostringstream text;
  auto verb = [](const Access& access) { return access.is_write ? "write" : "read"; };
  text << "RACE: " << verb(now) << " by " << now.op << " on stream " << now.stream << " is not ordered after "
       << verb(before) << " by " << before.op << " on stream " << before.stream << ", " << now.end - now.begin
       << " bytes of a block of " << block.asked;
  reports.push_back({text.str(), now.stack, before.stack});
}

// Note what a kernel or copy on `stream` reads or writes; report what it is not ordered after.
inline void touch(uintptr_t begin, size_t size, int stream, bool is_write, const std::string& op, const Stack& stack) {
  if (!size || !on_device(reinterpret_cast<void*>(begin))) return;
  auto* block = block_of(begin);
  if (!block || !block->in_use) return reports.push_back({"USE of freed device memory by " + op, stack, nullptr});
  auto& clock = streams[stream].clock;
  Access now{begin, begin + size, stream, clock.of(stream), is_write, op, stack};
  for (auto old = block->log.begin(); old != block->log.end();) {
    bool overlaps = old->begin < now.end && now.begin < old->end;
    bool ordered = old->stream == stream || clock.of(old->stream) >= old->time;
    if (overlaps && !ordered && (old->is_write || is_write)) report_race(*block, now, *old);
    bool covered = now.begin <= old->begin && old->end <= now.end;
    bool stands_for_it = (old->stream == stream && old->is_write <= is_write) || (is_write && ordered);
    bool past = host.of(old->stream) >= old->time;  // for all that is launched from now on
    if (past || (covered && stands_for_it)) old = block->log.erase(old); else ++old;
  }
  block->log.push_back(std::move(now));
}

inline std::pair<uintptr_t, size_t> range_of(const at::Tensor& tensor) {
  if (!tensor.numel()) return {0, 0};
  size_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), (last + 1) * tensor.element_size()};
}
inline void touch(const at::Tensor& tensor, int stream, bool is_write, const std::string& op, const Stack& stack) {
  auto [begin, size] = range_of(tensor);
  touch(begin, size, stream, is_write, op, stack);
}

}  // namespace simulated
