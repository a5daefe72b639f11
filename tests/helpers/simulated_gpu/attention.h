// Attention and RMS norm, which autograd would send to fused CUDA kernels: as the CPU build computes them.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels.h"

namespace simulated {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Inputs are query, key, value and mask; torch saves no undefined tensor, so `is_masked` says whether there is one.
class Attention : public torch::autograd::Function<Attention> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& mask, bool is_masked, bool causal, std::optional<double> scale, bool grouped) {
    at::AutoDispatchBelowADInplaceOrView below;
    Kernel kernel(query.get_device(), "attention");
    auto inputs = taken(kernel, {query, key, value, is_masked ? mask : Tensor()});
    context->save_for_backward({query, key, value, mask});
    context->saved_data["is_masked"] = is_masked;
    context->saved_data["causal"] = causal;
    context->saved_data["grouped"] = grouped;
    context->saved_data["scale"] = scale;
    return kernel.to_device(computed(inputs, causal, scale, grouped));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto saved = context->get_saved_variables();
    if (!context->saved_data["is_masked"].toBool()) saved[3] = Tensor();
    Kernel kernel(saved[0].get_device(), "attention backward");
    auto gradient = taken(kernel, {gradients[0]})[0];
    auto inputs = taken(kernel, saved);
    for (int i = 0; i < 3; i++) inputs[i].requires_grad_(true);
    at::AutoGradMode enabled(true);
    auto causal = context->saved_data["causal"].toBool(), grouped = context->saved_data["grouped"].toBool();
    auto scale = context->saved_data["scale"].toOptional<double>();
    auto output = computed(inputs, causal, scale, grouped);
    auto found = torch::autograd::grad({output}, {inputs[0], inputs[1], inputs[2]}, {gradient});
    variable_list results(8);
    for (int i = 0; i < 3; i++) results[i] = kernel.to_device(found[i].detach());
    return results;
  }

 private:
  static std::vector<Tensor> taken(const Kernel& kernel, const std::vector<Tensor>& tensors) {
    std::vector<Tensor> made;
    for (const auto& tensor : tensors) {
      int device = kernel.device;
      if (tensor.defined()) require_one_device(tensor, device, kernel.op), kernel.uses(tensor, false);
      made.push_back(tensor.defined() ? on_cpu(tensor) : tensor);
    }
    write_reports();
    return made;
  }
  static Tensor computed(const std::vector<Tensor>& in, bool causal, std::optional<double> scale, bool grouped) {
    auto mask = in[3].defined() ? std::optional<Tensor>(in[3]) : std::nullopt;
    return at::scaled_dot_product_attention(in[0], in[1], in[2], mask, 0.0, causal, scale, grouped);
  }
};

inline Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                        double dropout, bool causal, std::optional<double> scale, bool grouped) {
  TORCH_CHECK(dropout == 0, "simulated GPU: attention has no dropout");
  return Attention::apply(query, key, value, mask.value_or(query), mask.has_value(), causal, scale, grouped);
}

// As rms_norm_composite of torch 2.13, which the CPU takes; a GPU would take a fused kernel without a CPU backward.
inline Tensor rms_norm(const Tensor& x, c10::IntArrayRef shape, const std::optional<Tensor>& weight, std::optional<double> eps) {
  std::vector<int64_t> dims;
  for (size_t d = 0; d < shape.size(); d++) dims.push_back(x.dim() - static_cast<int64_t>(d) - 1);
  bool is_double = x.scalar_type() == at::kDouble;
  auto wide = (is_double ? x : x.to(at::kFloat)).contiguous();
  double least = is_double ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  auto normed = wide.mul(at::rsqrt(at::pow(wide, 2).mean(dims, true).add_(eps.value_or(least))));
  if (weight && weight->defined()) normed = normed.mul(*weight);
  return normed.type_as(x);
}

}  // namespace simulated
