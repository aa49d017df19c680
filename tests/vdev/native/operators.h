// What operators share: aliases of tensors, the thread's state that kernels want, and calls.
#pragma once

#include "vdev.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <unordered_map>

namespace vdev {

// Tensors of the CPU over the memory of tensors of a device, and back.
enum class Owning { yes, no };
class Aliases {
 public:
  Aliases(c10::Device device, Owning owning) : device_(device), owning_(owning) {}
  at::Tensor on_cpu(const at::Tensor& tensor);
  at::Tensor on_device(const at::Tensor& result);
  void take_over_shape(const at::Tensor& alias); // what a kernel changed of an argument besides its values

 private:
  c10::Storage storage_on_device(const c10::Storage& storage);

  c10::Device device_;
  Owning owning_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> aliases_;   // by the device's tensor
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_; // by the alias
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};
using OnTensor = std::function<at::Tensor(const at::Tensor&)>;
c10::IValue with_tensors(const c10::IValue& value, const OnTensor& change); // of a tensor or a list of them
void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look);

struct KernelDepth { // what the host computes within is not its own
  KernelDepth();
  ~KernelDepth();
  KernelDepth(const KernelDepth&) = delete;
};

// The state of a thread in which a kernel of the CPU runs, whoever launched it.
struct KernelScope {
  KernelDepth depth;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes;
  KernelScope();
};

// operators.cpp, late.cpp
c10::Device common_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
bool writes(const c10::Argument& argument);
void on_kernels_of_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
bool launch_late(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device);
torch::jit::Stack cpu_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack, c10::Device device,
                           const OnTensor& change);

} // namespace vdev
