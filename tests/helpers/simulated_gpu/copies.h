// Copies between host and devices. What CUDA may do later is done as late as allowed, its target poisoned at once.
#pragma once

#include "kernels.h"

namespace simulated {

inline void peer_copy(const Tensor& to, const Tensor& from) {
  auto here = stack();
  int source = from.get_device(), target = to.get_device();
  {
    Lock lock(mutex);
    int reader = current_stream(source), writer = current_stream(target);
    streams[reader].clock.join(streams[writer].clock);  // as torch does, on both sides of the copy
    launch(reader);
    touch(from, reader, false, "copy between devices", here);
    touch(to, reader, true, "copy between devices", here);
    streams[writer].clock.join(streams[reader].clock);
  }
  write_reports();
  on_cpu(to).copy_(on_cpu(from));
}

// The host's side of a late copy. Torch's own page-locked memory lives until its copies are done; registered does not.
inline Tensor host_side(const Tensor& tensor) {
  if (is_within(pinned, tensor.const_data_ptr())) return tensor.alias();
  auto* memory = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

inline void poison(const Tensor& target) {
  if (target.is_non_overlapping_and_dense()) std::memset(target.data_ptr(), 0xff, target.nbytes());
}

inline void host_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  bool is_upload = to.is_cuda();
  const Tensor &device = is_upload ? to : from, &cpu = is_upload ? from : to;
  bool pinned_memory = is_pinned(cpu.const_data_ptr());
  bool same_layout = to.dtype() == from.dtype() && to.strides() == from.strides() && to.is_non_overlapping_and_dense();
  bool late = non_blocking && (is_upload || pinned_memory);
  auto here = stack();
  auto [begin, size] = range_of(device);
  auto [host_begin, host_size] = range_of(cpu);
  std::string op = is_upload ? "copy to the device" : "copy to the host";
  if (!late || !pinned_memory) note_wait(op + (pinned_memory ? "" : ", pageable memory"));
  Lock lock(mutex);
  int stream = current_stream(device.get_device());
  enqueue_copy(stream, begin, begin + size, host_begin, host_begin + host_size);
  touch(device, stream, is_upload, op, here);
  if (!late) {
    host_waits_for(streams[stream].clock);
    if (is_upload) on_cpu(device).copy_(from); else to.copy_(on_cpu(device));
    return;
  }
  // pageable memory is staged by the driver, and what has another layout is made contiguous first
  bool staged = is_upload && !(pinned_memory && same_layout);
  Tensor there = on_cpu(device), here_side = staged ? cpu.clone() : host_side(cpu);
  poison(is_upload ? there : here_side);
  auto run = [=] { is_upload ? there.copy_(here_side) : here_side.copy_(there); };
  if (staged) host_begin = host_size = 0;
  Time time = streams[stream].clock.of(stream);
  late_copies.push_back({stream, time, run, begin, begin + size, host_begin, host_begin + host_size});
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || !self.numel()) return self;
  TORCH_CHECK(!self.is_meta() && !source.is_meta(), "Cannot copy out of meta tensor; no data!");
  Tensor from = source.sizes().equals(self.sizes()) ? source : source.expand(self.sizes());
  if (!(self.is_cuda() && from.is_cuda())) {
    host_copy(self, from, non_blocking);
  } else if (self.get_device() != from.get_device()) {
    peer_copy(self, from);
  } else {
    Kernel kernel(self.get_device(), "copy");
    kernel.uses(from, false);
    kernel.uses(self, true);
    on_cpu(self).copy_(on_cpu(from));
  }
  write_reports();
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  target.copy_(self, non_blocking);
  return target;
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (!target.sizes().equals(self.sizes())) target.resize_(self.sizes());
  target.copy_(self);
  return target;
}

}  // namespace simulated
