// Kernels of the simulated devices: the CPU's own, on the same memory, so that every number is the CPU's.
//
// One fallback serves nearly all: it makes of each device tensor a CPU tensor over the same memory, calls the CPU's
// kernel, and moves new results to device memory. A composite kernel wins over a backend's fallback, so operators that
// would branch on is_cuda() are registered by name.
#pragma once

#include <ATen/ATen.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.h"

namespace simulated {

using at::Tensor;

// ---- tensors over the same memory --------------------------------------------------------------------------------

inline Tensor on_cpu(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr memory(reachable(storage.data_ptr().get()), nullptr, [](void*) {}, Device(DeviceType::CPU));
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), nullptr, false);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

// What one kernel reads and writes, on which stream; made before it runs.
struct Kernel {
  int device, stream;
  std::string op;
  Stack here;

  Kernel(int on, std::string name) : device(on), op(std::move(name)), here(stack()) {
    Lock lock(mutex);
    launch(stream = current_stream(device));
  }
  void uses(const Tensor& tensor, bool is_write) const {
    Lock lock(mutex);
    touch(tensor, stream, is_write, op, here);
  }
  Tensor to_device(const Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    Device target(DeviceType::CUDA, device);
    c10::DeviceGuard guard(target);
    auto made = at::empty_strided(result.sizes(), result.strides(), result.options().device(target));
    if (result.numel()) {
      std::memcpy(reachable(made.data_ptr()), result.const_data_ptr(), range_of(result).second);
      uses(made, true);
    }
    return made;
  }
  void host_waits(const std::string& kind) const {
    note_wait(kind);
    Lock lock(mutex);
    host_waits_for(streams[stream].clock);
  }
};

inline void require_one_device(const Tensor& tensor, int& device, const std::string& op) {
  TORCH_CHECK(device < 0 || device == tensor.get_device(), "Expected all tensors to be on the same device, but found ",
              "at least two devices, cuda:", device, " and cuda:", static_cast<int>(tensor.get_device()), "! (", op, ")");
  device = tensor.get_device();
}

// ---- the fallback --------------------------------------------------------------------------------------------------

// One call of an operator: its arguments on the stack as given, then over the same memory, then its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, c10::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack->size() - schema_.arguments().size()),
        given_(stack->begin() + static_cast<int64_t>(first_), stack->end()) {
    auto overload = schema_.operator_name().overload_name;
    name_ = schema_.operator_name().name + (overload.empty() ? "" : "." + overload);
    for (size_t i = 0; i < given_.size(); i++)
      each_tensor(given_[i], [&](const Tensor& tensor) { inspect(tensor, is_written(i)); });
    TORCH_CHECK(!(cpu_beside_ && device_ >= 0), "Expected all tensors to be on the same device, but found at least ",
                "two devices, cuda:", device_, " and cpu! (", name_, ")");
    if (device_ < 0) device_ = current_device;
  }

  void run() {
    Kernel kernel(device_, name_);
    for (auto& [tensor, is_write] : used_) kernel.uses(tensor, is_write);
    write_reports();
    for (size_t i = 0; i < given_.size(); i++) (*stack_)[first_ + i] = replaced(given_[i], i);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (auto& [tensor, alias] : written_) keep_size(kernel, tensor, alias);
    bool tells_host = false;
    for (size_t r = 0; r < schema_.returns().size(); r++) tells_host |= !take_back(kernel, r);
    if (tells_host || result_has_a_size_of_its_data()) kernel.host_waits(name_);
    write_reports();
  }

 private:
  bool is_written(size_t i) const {
    auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  template <class F>
  static void each_tensor(const c10::IValue& value, F see) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) see(tensor);
    else if (value.isOptionalTensorList())
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) if (tensor) see(*tensor);
  }
  // Indices may be on the CPU, as may tensors that are one number.
  bool takes_cpu_indices() const {
    return name_.starts_with("aten::index.") || name_.find("index_put") != std::string::npos;
  }
  void inspect(const Tensor& tensor, bool is_write) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      require_one_device(tensor, device_, name_);
      used_.emplace_back(tensor, is_write);
    } else if (tensor.device().is_cpu() && (tensor.dim() > 0 || is_write) && !takes_cpu_indices()) {
      cpu_beside_ = true;
    }
  }

  Tensor alias(const Tensor& tensor, bool is_write) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto& made = aliases_[tensor.unsafeGetTensorImpl()];
    if (made.defined()) return made;
    bool is_filled = is_write && !tensor.numel();  // an `out` that the kernel resizes
    made = is_filled ? at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype())) : on_cpu(tensor);
    if (is_write) written_.emplace_back(tensor, made);
    return made;
  }
  c10::IValue replaced(const c10::IValue& value, size_t i) {
    bool is_write = is_written(i);
    if (value.isTensor()) return alias(value.toTensor(), is_write);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(alias(tensor, is_write));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(alias(*tensor, is_write)) : tensor);
      return list;
    }
    if (schema_.arguments()[i].name() == "generator") {
      auto generator = value.isNone() ? generators()[device_] : value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu' (", name_, ")");
      return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(DeviceType::CPU);
    return value;
  }

  void keep_size(const Kernel& kernel, const Tensor& tensor, const Tensor& result) const {
    if (tensor.sizes().equals(result.sizes())) return;
    tensor.resize_(result.sizes());
    if (!result.numel()) return;
    on_cpu(tensor).copy_(result);
    kernel.uses(tensor, true);
  }
  // Put a result on the stack as the device's; false if it is a number, which the host waits for.
  bool take_back(const Kernel& kernel, size_t r) {
    auto& value = (*stack_)[stack_->size() - schema_.returns().size() + r];
    auto* info = schema_.returns()[r].alias_info();
    if (info && info->isWrite()) {
      for (size_t i = 0; i < given_.size(); i++) {
        auto* argument = schema_.arguments()[i].alias_info();
        if (argument && *argument == *info) { value = given_[i]; break; }
      }
    } else if (value.isTensor()) {
      value = result(kernel, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(result(kernel, tensor));
      value = list;
    } else {
      return false;
    }
    return true;
  }
  Tensor result(const Kernel& kernel, const Tensor& tensor) const {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto address = tensor.numel() ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) - distance : 0;
    for (auto& [input, _] : used_) {  // a view of an argument
      auto [begin, size] = range_of(input);
      if (!size || address < begin || address >= begin + size) continue;
      auto offset = address - reinterpret_cast<uintptr_t>(input.storage().data_ptr().get());
      return input.as_strided(tensor.sizes(), tensor.strides(), offset / tensor.element_size());
    }
    return kernel.to_device(tensor);
  }
  bool result_has_a_size_of_its_data() const {
    for (auto* name : {"nonzero", "masked_select", "unique"})
      if (name_.find(name) != std::string::npos) return true;
    return false;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  c10::Stack* stack_;
  size_t first_;
  std::vector<c10::IValue> given_;
  std::string name_;
  int device_ = -1;
  bool cpu_beside_ = false;
  std::vector<std::pair<Tensor, bool>> used_;
  std::vector<std::pair<Tensor, Tensor>> written_;
  std::map<c10::TensorImpl*, Tensor> aliases_;
};

inline void fallback(const c10::OperatorHandle& op, c10::Stack* stack) { Call(op, stack).run(); }

// ---- tensors and storages ------------------------------------------------------------------------------------------

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(DeviceType::CUDA, current_device)));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(DeviceType::CUDA, current_device)));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}
inline void resize_storage(c10::StorageImpl* storage, size_t size, int device) {
  c10::DeviceGuard guard(Device(DeviceType::CUDA, device));
  auto memory = device_allocator.allocate(size);
  if (size_t kept = std::min(size, storage->nbytes())) {
    Kernel kernel(device, "resize");
    Lock lock(mutex);
    touch(reinterpret_cast<uintptr_t>(storage->data()), kept, kernel.stream, false, kernel.op, kernel.here);
    std::memcpy(reachable(memory.get()), reachable(storage->data()), kept);
    touch(reinterpret_cast<uintptr_t>(memory.get()), kept, kernel.stream, true, kernel.op, kernel.here);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
}
inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (!self.sizes().equals(size)) tensor->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  size_t needed = (self.numel() + self.storage_offset()) * self.element_size();
  if (self.numel() && needed > self.storage().nbytes())
    resize_storage(self.storage().unsafeGetStorageImpl(), needed, self.get_device());
  return self;
}
inline Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) tensor->set_sizes_contiguous(size); else tensor->set_sizes_and_strides(size, stride);
  return self;
}
inline Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_to_storage(Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {elements}, {});
}
inline Tensor& set_to_nothing(Tensor& self) {
  c10::DataPtr nothing(nullptr, Device(DeviceType::CUDA, self.get_device()));
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(nothing), &device_allocator, true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}
inline bool is_set_to(const Tensor& a, const Tensor& b) {
  bool same_storage = a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
  return same_storage && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}
inline void record_stream(Tensor& tensor, c10::Stream stream) {
  device_allocator.recordStream(tensor.storage().data_ptr(), stream);
}
inline at::Scalar item(const Tensor& tensor) {
  Kernel kernel(tensor.get_device(), "item");
  kernel.uses(tensor, false);
  kernel.host_waits("item");
  write_reports();
  return on_cpu(tensor).item();
}

}  // namespace simulated
