// A simulated CUDA device inside a CPU build of torch 2.13: what it computes are the CPU's numbers, what it checks is
// where tensors are, when copies happen, what orders accesses, and how much memory is taken.
//
// It occupies the slot for CUDA that a CPU build leaves empty: device type, dispatch keys and hooks are there, kernels and
// devices are not. (PrivateUse1 would not do: it refuses the name, and DeepSpeed's accelerator calls torch.cuda.) It never
// shows kernels' own rounding, real time and overlap, NCCL itself, fragmentation by a driver, or compiled code.
#include "attention.h"
#include "collectives.h"
#include "copies.h"

namespace simulated {

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_to_tensor);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_", set_to_nothing);
  m.impl("is_set_to", is_set_to);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("rms_norm", rms_norm);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  for (const char* name : {"convolution", "convolution_backward", "convolution_overrideable", "native_layer_norm",
                           "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
                           "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("scaled_dot_product_attention", attention);
}

// A composite kernel wins over the fallback too, and may compute otherwise than the CPU's own (silu_backward of torch
// 2.13): whatever has a kernel of the CPU beside a composite one gets the fallback by name.
void prefer_cpu_kernels() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  using Key = c10::DispatchKey;
  auto has_composite = [](const c10::OperatorHandle& op) {
    return op.hasKernelForDispatchKey(Key::CompositeImplicitAutograd) ||
           op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
           op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
  };
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(Key::CPU) || op->hasKernelForDispatchKey(Key::CUDA) || !has_composite(*op)) continue;
    auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    aten.impl((name.name + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

struct AtImport {
  AtImport() {
    install();
    prefer_cpu_kernels();
  }
} at_import;

std::map<std::string, int64_t> statistics(int device) {
  auto stats = device_allocator.getDeviceStats(static_cast<DeviceIndex>(device));
  std::map<std::string, int64_t> found{{"num_alloc_retries", stats.num_alloc_retries}, {"num_ooms", stats.num_ooms},
                                       {"num_device_alloc", stats.num_device_alloc}, {"num_sync_all_streams", 0}};
  auto add = [&](const std::string& name, const auto& stat) {
    found[name + ".all.current"] = stat[0].current;
    found[name + ".all.peak"] = stat[0].peak;
    found[name + ".all.allocated"] = stat[0].allocated;
    found[name + ".all.freed"] = stat[0].freed;
  };
  add("allocation", stats.allocation);
  add("allocated_bytes", stats.allocated_bytes);
  add("reserved_bytes", stats.reserved_bytes);
  add("active_bytes", stats.active_bytes);
  add("requested_bytes", stats.requested_bytes);
  return found;
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  using Release = py::call_guard<py::gil_scoped_release>;  // before the lock, see order.h
  m.def("device_count", number_of_devices);
  m.def("visible_devices", visible_devices);
  m.def("current_device", [] { return current_device; });
  m.def("set_device", set_device);
  m.def("exchange_device", [](int device) { int old = current_device; set_device(device); return old; });
  m.def("current_stream", [](int device) {
    Lock lock(mutex);
    auto stream = as_stream(current_stream(device));
    return std::make_pair(stream.id(), static_cast<int>(stream.device_index()));
  }, Release());
  m.def("set_stream", [](int64_t id, int device, int) {
    set_device(device);
    current_stream(device);
    current_streams[device] = id ? static_cast<int>(id) : device;
  });
  m.def("synchronize", [] { wait_for_device(current_device); }, Release());
  m.def("empty_cache", [] { device_allocator.emptyCache({0, 0}); }, Release());
  m.def("reset_peak", [](int device) { device_allocator.resetPeakStats(static_cast<DeviceIndex>(device)); }, Release());
  m.def("mem_info", [](int device) { return device_allocator.getMemoryInfo(static_cast<DeviceIndex>(device)); }, Release());
  m.def("statistics", statistics, Release());
  m.def("register_host", register_host, Release());
  m.def("unregister_host", unregister_host, Release());
  m.def("generators", [] { return generators(); });
  m.def("resize_storage", [](const at::Storage& storage, size_t size) {
    resize_storage(storage.unsafeGetStorageImpl(), size, storage.device().index());
  }, Release());
  py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(m, "Nccl")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
        return c10::make_intrusive<Nccl>(std::move(gloo), rank, size);
      }));
}
