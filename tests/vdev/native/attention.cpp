// Attention: the same kernel as on the CPU is chosen, by shapes and types alone.
#include "operators.h"

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>

namespace vdev {
namespace {

int64_t chosen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  Aliases aliases(query.device(), Owning::yes);
  const auto on_cpu = [&](const at::Tensor& tensor) {
    auto alias = aliases.on_cpu(tensor);
    if (alias.defined() && tensor.requires_grad()) {
      alias.set_requires_grad(true); // no kernel but the plain one has a gradient for the mask
    }
    return alias;
  };
  return at::_fused_sdp_choice(on_cpu(query), on_cpu(key), on_cpu(value),
                               mask ? std::optional<at::Tensor>(on_cpu(*mask)) : std::nullopt, dropout, is_causal,
                               scale, enable_gqa);
}

} // namespace
} // namespace vdev

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", vdev::chosen_attention);
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &vdev::chosen_attention)
} // namespace at::native
