// What is free on the simulated devices, and the allocator: by the rules of torch's own caching allocator.
#pragma once

#include <fcntl.h>

#include "blocks.h"

namespace simulated {

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
