// Memory of the simulated devices, by the rules of torch's own caching allocator.
//
// A device's addresses are a mapping without access, so that host code that reads through one dies at once; kernels use
// a second mapping at a constant distance. What is given out is filled with 0xFF, which is NaN in every float type.
#pragma once

#include <ATen/EmptyTensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <list>
#include <map>

#include "order.h"

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr size_t ADDRESSES = 1ull << 36;  // of a device
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

// A piece of a segment, which is what a driver gives; its neighbours there are `before` and `after`.
struct Block {
  uintptr_t address;
  size_t size, asked;
  int device, stream;
  bool is_small, in_use;
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
  std::map<size_t, std::vector<uintptr_t>> given_back;  // segments, by size
  std::set<Block*, BySize> free_small, free_large;
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

// ---- what other processes have of the devices -----------------------------------------------------------------

struct Share {
  pid_t pid;
  size_t bytes[MOST_DEVICES];
};
constexpr int SHARES = 256;

inline Share* shares() {
  static Share* table = nullptr;
  static pid_t opened_by = 0;
  if (opened_by == getpid()) return table;  // a fork may have another environment
  opened_by = getpid();
  const char* file = std::getenv("SIMULATED_GPU_SHARED");
  int fd = file ? open(file, O_RDWR | O_CREAT, 0600) : -1;
  int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  TORCH_CHECK(fd < 0 || ftruncate(fd, SHARES * sizeof(Share)) == 0, "simulated GPU: ", file ? file : "");
  table = static_cast<Share*>(mmap(nullptr, SHARES * sizeof(Share), PROT_READ | PROT_WRITE, flags, fd, 0));
  if (fd >= 0) close(fd);
  return table;
}
inline Share& own_share() {
  static Share* own = nullptr;
  if (own && own->pid == getpid()) return *own;  // not after a fork
  for (own = shares(); own < shares() + SHARES; own++) {
    pid_t pid = own->pid;
    bool is_free = !pid || kill(pid, 0) != 0;
    if (is_free && __sync_bool_compare_and_swap(&own->pid, pid, getpid())) {
      std::fill_n(own->bytes, MOST_DEVICES, 0);
      return *own;
    }
  }
  TORCH_CHECK(false, "simulated GPU: more than ", SHARES, " processes");
}
inline size_t reserved(int device) { return memories[device].stats.reserved_bytes[0].current; }
inline size_t of_others(int device) {
  size_t bytes = 0;
  for (auto* one = shares(); one < shares() + SHARES; one++)
    if (one->pid && one->pid != getpid() && kill(one->pid, 0) == 0) bytes += one->bytes[visible_devices().at(device)];
  return bytes;
}
inline size_t unused(int device) {
  size_t used = reserved(device) + of_others(device);
  return used < limit(device) ? limit(device) - used : 0;
}
inline void reserve(int device, int64_t bytes) {
  auto& stat = memories[device].stats.reserved_bytes[0];
  bytes > 0 ? stat.increase(bytes) : stat.decrease(-bytes);
  own_share().bytes[visible_devices().at(device)] = stat.current;
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

// ---- the caching allocator (c10/cuda/CUDACachingAllocator.cpp of torch 2.13: rounding, pools, splitting, merging) ---

constexpr size_t LONG_LOG = 16;

// Make one access of all by the block's own stream: for another stream, who waits for the last has waited for all.
inline void shorten_log(Block* block) {
  if (block->log.size() <= LONG_LOG) return;
  Access last{};
  for (auto access = block->log.begin(); access != block->log.end();) {
    if (access->stream != block->stream) { ++access; continue; }
    if (access->time >= last.time) last = *access;
    access = block->log.erase(access);
  }
  if (!last.time) return;
  last.begin = block->address, last.end = block->address + block->size, last.is_write = true;
  block->log.push_back(last);
}

inline void to_pool(Block* block) {
  auto& memory = memories[block->device];
  memory.stats.active_bytes[0].decrease(block->size);
  auto swallow = [&](Block* left, Block* right) {  // `right`, free, becomes part of `left`
    left->size += right->size;
    left->log.splice(left->log.end(), right->log);
    if ((left->after = right->after)) left->after->before = left;
    blocks.erase(right->address);
    delete right;
  };
  auto idle = [&](Block* other) { return other && memory.free(other->is_small).erase(other); };
  block->users.clear();
  if (idle(block->after)) swallow(block, block->after);
  if (auto* left = block->before; idle(left)) swallow(left, block), block = left;
  shorten_log(block);
  memory.free(block->is_small).insert(block);
}

// Take back what other streams used, if the host knows that they are done, or waits for it.
inline void reap(int device, bool wait) {
  auto& waiting = memories[device].waiting;
  for (auto at = waiting.begin(); at != waiting.end();) {
    if (wait) host_waits_for((*at)->used_until);
    if (host.covers((*at)->used_until)) { auto* block = *at; at = waiting.erase(at); to_pool(block); } else ++at;
  }
}

// Give whole segments back to the driver, which waits for the device.
inline void empty_cache(int device) {
  auto& memory = memories[device];
  for (auto* pool : {&memory.free_small, &memory.free_large})
    for (auto at = pool->begin(); at != pool->end();) {
      auto* block = *at;
      if (block->before || block->after) { ++at; continue; }
      for (auto& stream : streams) if (stream.device == device) host_waits_for(stream.clock);
      auto memory_of = reinterpret_cast<uintptr_t>(reachable(block->address));
      madvise(reinterpret_cast<void*>(memory_of), block->size, MADV_DONTNEED);  // segments are whole pages
      reserve(device, -static_cast<int64_t>(block->size));
      memory.stats.segment[0].decrease(1);
      memory.given_back[block->size].push_back(block->address);
      at = pool->erase(at);
      blocks.erase(block->address);
      delete block;
    }
}

inline Block* new_segment(int device, int stream, size_t size, bool is_small) {
  auto& memory = memories[device];
  size_t segment = is_small ? 2 * MIB : size < 10 * MIB ? 20 * MIB : (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  if (segment > unused(device)) return nullptr;
  auto& old = memory.given_back[segment];
  uintptr_t address = memory.base + memory.next;
  if (!old.empty()) address = old.back(), old.pop_back(); else memory.next += segment;
  reserve(device, segment);
  memory.stats.segment[0].increase(1);
  memory.stats.num_device_alloc++;
  return blocks[address] = new Block{address, segment, 0, device, stream, is_small, false};
}

inline Block* free_block_for(int device, int stream, size_t size, bool is_small) {
  auto& pool = memories[device].free(is_small);
  Block least{0, size, 0, device, stream, is_small, false};
  auto at = pool.lower_bound(&least);
  if (at == pool.end() || (*at)->stream != stream) return nullptr;
  auto* block = *at;
  pool.erase(at);
  return block;
}

inline void split(Block* block, size_t size) {
  size_t rest = block->size - size;
  if (rest < (block->is_small ? 512 : MIB + 1)) return;
  auto* right = new Block{block->address + size, rest, 0, block->device, block->stream, block->is_small, false};
  right->before = block;
  if ((right->after = block->after)) right->after->before = right;
  block->after = right;
  block->size = size;
  for (auto access = block->log.begin(); access != block->log.end();) {
    if (access->end > right->address) {
      right->log.push_back(*access);
      right->log.back().begin = std::max(access->begin, right->address);
      access->end = right->address;
    }
    if (access->begin >= access->end) access = block->log.erase(access); else ++access;
  }
  blocks[right->address] = right;
  memories[block->device].free(block->is_small).insert(right);
}

[[noreturn]] inline void out_of_memory(int device, size_t asked) {
  auto& stats = memories[device].stats;
  stats.num_ooms++;
  auto mib = [](size_t bytes) { return std::to_string(bytes / MIB) + " MiB"; };
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", mib(asked), ". GPU ", device,
                   " has a total capacity of ", mib(limit(device)), " of which ", mib(unused(device)),
                   " is free. Of the allocated memory ", mib(stats.allocated_bytes[0].current),
                   " is allocated by PyTorch, and ",
                   mib(stats.reserved_bytes[0].current - stats.allocated_bytes[0].current),
                   " is reserved by PyTorch but unallocated.");
}

inline Block* allocate(int device, size_t asked) {
  Lock lock(mutex);
  auto& stats = memories[device].stats;
  size_t size = std::max<size_t>(512, (asked + 511) / 512 * 512);
  bool is_small = size <= MIB;
  int stream = current_stream(device);
  reap(device, false);
  auto find = [&] {
    auto* block = free_block_for(device, stream, size, is_small);
    return block ? block : new_segment(device, stream, size, is_small);
  };
  auto* block = find();
  if (!block) {
    stats.num_alloc_retries++;
    reap(device, true);
    empty_cache(device);
    if (!(block = find())) out_of_memory(device, asked);
  }
  split(block, size);
  for (auto& copy : late_copies)  // of the former owner: stream order
    if (copy.stream == stream && copy.device_begin < block->address + size && block->address < copy.device_end) {
      run_copies(streams[stream].clock);
      break;
    }
  block->in_use = true;
  block->asked = asked;
  stats.allocation[0].increase(1);
  stats.allocated_bytes[0].increase(block->size);
  stats.requested_bytes[0].increase(asked);
  stats.active_bytes[0].increase(block->size);
  std::memset(reachable(block->address), 0xff, block->size);
  return block;
}

inline void free_device(void* context) {
  Lock lock(mutex);
  auto* block = static_cast<Block*>(context);
  auto& memory = memories[block->device];
  memory.stats.allocation[0].decrease(1);
  memory.stats.allocated_bytes[0].decrease(block->size);
  memory.stats.requested_bytes[0].decrease(block->asked);
  block->in_use = false;
  block->used_until = {};
  for (int user : block->users) block->used_until.join(streams[user].clock);
  if (block->users.empty() || host.covers(block->used_until)) to_pool(block); else memory.waiting.push_back(block);
}

inline int number_of(const c10::Stream& stream) {
  if (stream.id()) return static_cast<int>(stream.id());
  return stream.device_index() < 0 ? current_device : stream.device_index();
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(DeviceType::CUDA, current_device);
    if (!size) return {nullptr, nullptr, &free_device, device};
    auto* block = simulated::allocate(current_device, size);
    return {reinterpret_cast<void*>(block->address), block, &free_device, device};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    Lock lock(mutex);
    launch(current_stream(current_device));
    std::memcpy(on_device(to) ? reachable(to) : to, on_device(from) ? reachable(from) : from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex);
    for (size_t device = 0; device < memories.size(); device++) reap(device, false), empty_cache(device);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(mutex);
    auto* block = pointer.get() ? block_of(reinterpret_cast<uintptr_t>(pointer.get())) : nullptr;
    if (block && number_of(stream) != block->stream) block->users.insert(number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(mutex);
    return memories[device].stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    Lock lock(mutex);
    auto& stats = memories[device].stats;
    for (auto* one : {&stats.allocation, &stats.segment, &stats.allocated_bytes, &stats.reserved_bytes,
                      &stats.active_bytes, &stats.requested_bytes})
      (*one)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock(mutex);
    return {unused(device), limit(device)};
  }
};
inline DeviceAllocator device_allocator;

}  // namespace simulated
