// Dropout as the CPU composes it: on accelerators torch takes a fused kernel, whose scale is rounded otherwise.
#include "operators.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

namespace vdev {
namespace {

at::Tensor factors(const at::Tensor& input, double p) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 1) {
    return at::zeros({}, input.options());
  }
  const c10::DeviceGuard guard(input.device());
  return at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

bool drops(const at::Tensor& input, double p, bool train) {
  return p != 0 && train && input.numel() > 0;
}

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  return drops(input, p, train) ? input.mul(factors(input, p)) : input;
}

at::Tensor& dropout_inplace(at::Tensor& input, double p, bool train) {
  return drops(input, p, train) ? input.mul_(factors(input, p)) : input;
}

// For a program that asks for the fused one by its name.
std::tuple<at::Tensor, at::Tensor> fused_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const bool dropped = drops(input, p, train.value_or(true));
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(dropped ? 1 - p : 1);
  return {dropped ? input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)) : input.clone(), mask};
}

} // namespace
} // namespace vdev

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", vdev::dropout);
  m.impl("dropout_", vdev::dropout_inplace);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("dropout", vdev::dropout);
  m.impl("dropout_", vdev::dropout_inplace);
  m.impl("native_dropout", vdev::fused_dropout);
}
