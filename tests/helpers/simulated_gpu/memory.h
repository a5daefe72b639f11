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
//
// With expandable segments, which the package turns on: a segment has more addresses than the device has memory, and
// memory is mapped to them, and taken back, in pieces of 2 MiB for small blocks and 20 MiB for others.

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

inline size_t piece(const Block* block) { return (block->is_small ? 2 : 20) * MIB; }
inline size_t rounded_up(size_t bytes, size_t whole) { return (bytes + whole - 1) / whole * whole; }

// Make `right` a part of its neighbour `left`.
inline void join(Block* left, Block* right) {
  left->size += right->size;
  left->log.splice(left->log.end(), right->log);
  if ((left->after = right->after)) left->after->before = left;
  blocks.erase(right->address);
  delete right;
}

// Cut a block after `size` bytes; return the rest, which is in no pool.
inline Block* cut(Block* block, size_t size) {
  auto* right = new Block{block->address + size, block->size - size, 0, block->device, block->stream, block->is_small,
                          false, block->is_mapped};
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
  return blocks[right->address] = right;
}

inline void to_pool(Block* block) {
  auto& memory = memories[block->device];
  auto& pool = memory.free(block->is_small);
  memory.stats.active_bytes[0].decrease(block->size);
  block->users.clear();
  if (auto* right = block->after; right && pool.erase(right)) join(block, right);
  if (auto* left = block->before; left && pool.erase(left)) join(left, block), block = left;
  shorten_log(block);
  pool.insert(block);
}

// Take back what other streams used, if the host knows that they are done, or waits for it.
inline void reap(int device, bool wait) {
  auto& waiting = memories[device].waiting;
  for (auto at = waiting.begin(); at != waiting.end();) {
    if (wait) host_waits_for((*at)->used_until);
    if (host.covers((*at)->used_until)) { auto* block = *at; at = waiting.erase(at); to_pool(block); } else ++at;
  }
}

// Give the whole pieces of a free block back to the driver.
inline void unmap(Block* block) {
  auto& memory = memories[block->device];
  auto& pool = memory.free(block->is_small);
  uintptr_t begin = memory.base + rounded_up(block->address - memory.base, piece(block));
  uintptr_t end = memory.base + (block->address + block->size - memory.base) / piece(block) * piece(block);
  if (begin >= end) return;
  pool.erase(block);
  if (begin > block->address) {
    auto* right = cut(block, begin - block->address);
    pool.insert(block);
    block = right;
  }
  if (end < block->address + block->size) pool.insert(cut(block, end - begin));
  block->is_mapped = false;
  block->log.clear();
  madvise(reachable(begin), end - begin, MADV_DONTNEED);
  reserve(block->device, -static_cast<int64_t>(end - begin));
  if (block->after && !block->after->is_mapped) join(block, block->after);
  if (block->before && !block->before->is_mapped) join(block->before, block);
}

// Give what is free back to the driver, which waits for the device.
inline void empty_cache(int device) {
  auto& memory = memories[device];
  for (auto& stream : streams) if (stream.device == device) host_waits_for(stream.clock);
  for (auto* pool : {&memory.free_small, &memory.free_large})
    for (auto* block : std::vector<Block*>(pool->begin(), pool->end())) unmap(block);
}

// Map memory to the first `size` bytes of a block that has none, if there is as much.
inline bool map(Block* block, size_t size) {
  size = std::min(block->size, rounded_up(size, piece(block)));
  if (size > unused(block->device)) return false;
  if (size < block->size) cut(block, size);
  block->is_mapped = true;
  reserve(block->device, size);
  memories[block->device].stats.num_device_alloc++;
  return true;
}

inline Block* first_of_segment(int device, int stream, bool is_small) {
  auto& memory = memories[device];
  auto& begin = memory.segments[{stream, is_small}];
  if (!begin) {
    size_t size = rounded_up(limit(device) / 8 * 9, 20 * MIB);
    begin = memory.base + memory.next;
    memory.next += size;
    TORCH_CHECK(memory.next <= ADDRESSES, "simulated GPU: no addresses are left for stream ", stream);
    blocks[begin] = new Block{begin, size, 0, device, stream, is_small, false, false};
  }
  return blocks.at(begin);
}

// Map memory behind a free block, or where there is none, so that there is a block of this size; it is in no pool.
inline Block* expand(int device, int stream, size_t size, bool is_small) {
  auto& pool = memories[device].free(is_small);
  for (auto* at = first_of_segment(device, stream, is_small); at; at = at->after) {
    if (at->is_mapped) continue;
    auto* start = at->before && pool.count(at->before) ? at->before : at;
    size_t room = 0;
    for (auto* one = start; one && (!one->is_mapped || pool.count(one)) && room < size; one = one->after) room += one->size;
    if (room < size) continue;
    if (start->is_mapped) pool.erase(start); else if (!map(start, size)) return nullptr;
    while (start->size < size) {
      auto* next = start->after;
      if (!pool.erase(next) && !map(next, size - start->size)) { pool.insert(start); return nullptr; }
      join(start, next);
    }
    return start;
  }
  return nullptr;
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
    return block ? block : expand(device, stream, size, is_small);
  };
  auto* block = find();
  if (!block) {
    stats.num_alloc_retries++;
    reap(device, true);
    empty_cache(device);
    if (!(block = find())) out_of_memory(device, asked);
    streams[stream].clock.join(host);  // of the kernel that asks: CUDA's is launched after this
  }
  if (block->size >= size + 512) memories[device].free(is_small).insert(cut(block, size));
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
    for (auto* one : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes,
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
