// Copies: on a device, between devices, from and to the host, in the order of the streams that CUDA gives them.
#include "operators.h"

#include <ATen/ops/alias.h>

namespace vdev {
namespace {

bool on_vdev(const at::Tensor& tensor) {
  return tensor.device().type() == kVdev;
}

// A tensor of the host over the same storage, which keeps that and nothing of Python's.
at::Tensor same_memory(const at::Tensor& tensor) {
  const KernelScope scope;
  return at::alias(tensor);
}

std::function<void()> copying(at::Tensor from, at::Tensor to) {
  return [from = std::move(from), to = std::move(to)] {
    const KernelScope scope;
    to.copy_(from);
  };
}

at::Tensor raw(const at::Tensor& tensor) {
  return Aliases(tensor.device(), delayed() ? Owning::no : Owning::yes).on_cpu(tensor);
}

// On the current stream of the source, which waits for that of the destination, and lets that wait for the copy.
void between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto& source = current_queue(from.device().index());
  auto& destination = current_queue(to.device().index());
  trace("stream waits", &source, 0, "", {}, &destination);
  trace_kernel(from.device(), "copy_", {from}, {to});
  trace("stream waits", &destination, 0, "", {}, &source);
  wait_on(source, end_of(destination));
  launch(source, copying(raw(from), raw(to)));
  wait_on(destination, end_of(source));
}

// What is not pinned is read before the call returns, as the driver of CUDA stages it.
void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& queue = current_queue(to.device().index());
  trace_kernel(to.device(), "copy_", {from}, {to});
  const bool staged = delayed() && non_blocking && !is_pinned(from.storage().data());
  launch(queue, copying(staged ? from.clone() : same_memory(from), raw(to)));
  if (!non_blocking) {
    finish(queue);
    trace("host waits for stream", &queue);
  }
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& queue = current_queue(from.device().index());
  trace_kernel(from.device(), "copy_", {from}, {to});
  launch(queue, copying(raw(from), same_memory(to)));
  if (!non_blocking || !is_pinned(to.storage().data())) {
    finish(queue);
    trace("host waits for stream", &queue);
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  TORCH_CHECK(from.layout() == at::kStrided && to.layout() == at::kStrided, "vdev holds dense tensors only");
  if (to.numel() == 0) {
    return to;
  }
  if (!on_vdev(from)) {
    TORCH_CHECK(from.device().is_cpu(), "no copy from ", from.device(), " to ", to.device());
    to_device(from, to, non_blocking);
  } else if (!on_vdev(to)) {
    TORCH_CHECK(to.device().is_cpu(), "no copy from ", from.device(), " to ", to.device());
    to_host(from, to, non_blocking);
  } else if (from.device() != to.device()) {
    between_devices(from, to);
  } else {
    trace_kernel(to.device(), "copy_", {from}, {to});
    launch(current_queue(to.device().index()), copying(raw(from), raw(to)));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

} // namespace
} // namespace vdev

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", vdev::copy_from);
  m.impl("_copy_from_and_resize", vdev::copy_from_and_resize);
}

// Numbers are conjugated or negated when a tensor that is lazily so is copied: to do that before would take a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
