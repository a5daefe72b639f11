// The simulated devices as torch sees them: guard, streams, events, random generators and the hooks of CUDA.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "host_memory.h"

namespace simulated {

constexpr int PATIENCE = 3;  // queries of an event after which a host that polls has waited for it

inline c10::Stream as_stream(int number) {  // a default stream has the number 0 on each device
  auto id = number < static_cast<int>(memories.size()) ? 0 : number;
  return c10::Stream(c10::Stream::UNSAFE, Device(DeviceType::CUDA, streams[number].device), id);
}
inline int new_stream(int device) {
  Lock lock(mutex);
  streams.push_back({device, {}});
  return static_cast<int>(streams.size()) - 1;
}
inline void require_device(int device) {
  TORCH_CHECK(device < number_of_devices(), "CUDA error: invalid device ordinal");
}
inline void set_device(int device) {
  require_device(device);
  if (device >= 0) current_device = device;
}
inline void wait_for_device(int device) {
  note_wait("device");
  Lock lock(mutex);
  Clock all;
  for (auto& stream : streams) if (stream.device == device) all.join(stream.clock);
  host_waits_for(all);
}

struct Event {
  Clock clock;
  int queries;
  double milliseconds;
};
inline double now() {
  auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Event* event(void* pointer) { return static_cast<Event*>(pointer); }

  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return number_of_devices(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }

  c10::Stream getStream(Device device) const override { return as_stream(current_stream(index(device))); }
  c10::Stream getDefaultStream(Device device) const override { return as_stream(index(device)); }
  c10::Stream getNewStream(Device device, int) const override { return as_stream(new_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = index(stream.device()), old = current_stream(device);
    current_streams[device] = number_of(stream);
    return as_stream(old);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    return host.covers(streams[number_of(stream)].clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("stream");
    Lock lock(mutex);
    host_waits_for(streams[number_of(stream)].clock);
  }
  void synchronizeDevice(const DeviceIndex device) const override { wait_for_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator.recordStream(pointer, stream);
  }

  void record(void** pointer, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    auto& clock = streams[number_of(stream)].clock;
    clock.join(host);
    if (!*pointer) *pointer = new Event;
    *event(*pointer) = {clock, 0, now()};
  }
  void block(void* pointer, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (pointer) streams[number_of(stream)].clock.join(event(pointer)->clock);
  }
  bool queryEvent(void* pointer) const override {
    Lock lock(mutex);
    if (!pointer || host.covers(event(pointer)->clock)) return true;
    if (event(pointer)->queries++ < PATIENCE) return false;
    host_waits_for(event(pointer)->clock);
    return true;
  }
  void synchronizeEvent(void* pointer) const override {
    note_wait("event");
    Lock lock(mutex);
    if (pointer) host_waits_for(event(pointer)->clock);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return event(end)->milliseconds - event(begin)->milliseconds;
  }
  void destroyEvent(void* pointer, const DeviceIndex) const noexcept override { delete event(pointer); }
};

// ---- random numbers: the CPU's, of a generator for each device ---------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;

  Generator(int device, at::Generator of_cpu)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        cpu(std::move(of_cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
};

inline at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}
inline std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int device = 0; device < MOST_DEVICES; device++) made.push_back(new_generator(device));
    return made;
  }();
  return all;
}

// ---- hooks -------------------------------------------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }  // or autograd finds no accelerator
  bool isAvailable() const override { return number_of_devices() > 0; }
  bool hasCUDA() const override { return isAvailable(); }
  bool hasCUDART() const override { return isAvailable(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return number_of_devices(); }
  DeviceIndex deviceCount() const override { return number_of_devices(); }
  DeviceIndex current_device() const override { return simulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto old = simulated::current_device;
    set_device(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void* pointer) const override {
    auto offset = reinterpret_cast<uintptr_t>(pointer) - first_address;
    return Device(DeviceType::CUDA, static_cast<DeviceIndex>(offset / ADDRESSES));
  }
  void deviceSynchronize(DeviceIndex device) const override { wait_for_device(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generators().at(device < 0 ? simulated::current_device : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? simulated::current_device : device);
  }
};

// Fill torch's empty slot for CUDA. It has made and kept its hooks while it was imported, so that a class registered
// afterwards is not looked for; that object has no members, so it takes the functions of ours (torch 2.13).
inline void install() {
  map_memory();
  static Guard guard;
  c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  static Hooks hooks{at::CUDAHooksArgs{}};
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(kept) = *reinterpret_cast<void**>(&hooks);
}

}  // namespace simulated
