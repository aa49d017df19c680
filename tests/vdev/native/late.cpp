// Operators in delay mode: shapes from the meta kernel now, values from the kernel of the CPU when the stream gets there.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

namespace vdev {
namespace {

using torch::jit::Stack;

bool returns_tensors_only(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->str();
    if (kind != "Tensor" && kind != "Tensor[]") {
      return false; // a number, which the host waits for
    }
  }
  return true;
}

bool draws(const c10::OperatorHandle& op) {
  for (const auto& argument : op.schema().arguments()) {
    if (argument.type()->str().rfind("Generator", 0) == 0) {
      return true;
    }
  }
  return false;
}

at::Tensor on_device(const at::Tensor& shape, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type());
}

// What is on the host is read at the launch: a number goes into the call of the kernel, indices are copied.
at::Tensor as_of_now(const at::Tensor& tensor) {
  const KernelScope scope;
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// Stand-ins without values, one a tensor, so that what a kernel returns of its arguments is known again.
class Shapes {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.device().is_cpu())) {
      return tensor;
    }
    auto& shape = shapes_[tensor.unsafeGetTensorImpl()];
    if (!shape.defined()) {
      shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
      tensors_[shape.unsafeGetTensorImpl()] = tensor;
      storages_.push_back(shape.storage().unsafeGetStorageImpl());
    }
    return shape;
  }

  const at::Tensor* argument(const at::Tensor& shape) const {
    const auto found = tensors_.find(shape.unsafeGetTensorImpl());
    return found == tensors_.end() ? nullptr : &found->second;
  }

  bool shares_memory(const at::Tensor& shape) const {
    const auto* storage = shape.storage().unsafeGetStorageImpl();
    return std::find(storages_.begin(), storages_.end(), storage) != storages_.end();
  }

  // An empty tensor that is to hold a result grows now; false where one with values changes its shape.
  bool settle() const {
    for (const auto& [impl, shape] : shapes_) {
      if (impl->sizes() == shape.sizes() && impl->strides() == shape.strides()) {
        continue;
      }
      if (impl->numel() > 0) {
        return false;
      }
      tensors_.at(shape.unsafeGetTensorImpl()).resize_(shape.sizes());
      impl->set_sizes_and_strides(shape.sizes(), shape.strides());
    }
    return true;
  }

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> shapes_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::vector<c10::StorageImpl*> storages_;
};

// None where there is no meta kernel, or where it refuses: the kernel of the CPU then says why, or does it.
std::optional<Stack> shapes_of_results(const c10::OperatorHandle& op, const Stack& stack, Shapes& shapes) {
  const auto& arguments = op.schema().arguments();
  Stack call;
  for (const auto& value : torch::jit::last(stack, arguments.size())) {
    call.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kMeta))
                                    : with_tensors(value, [&](const at::Tensor& tensor) { return shapes.of(tensor); }));
  }
  try {
    const KernelScope scope;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &call);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return shapes.settle() ? std::optional<Stack>(std::move(call)) : std::nullopt;
}

void put(const at::Tensor& value, const at::Tensor& place, const c10::OperatorHandle& op) {
  TORCH_CHECK(value.sizes() == place.sizes() && value.scalar_type() == place.scalar_type(), "the meta kernel of ",
              op.operator_name(), " promised ", place.sizes(), " of ", place.scalar_type(),
              ", the kernel of the CPU made ", value.sizes(), " of ", value.scalar_type());
  place.copy_(value);
}

// Random numbers are drawn at the launch, in the order of launches; the stream gets them when it gets there.
bool launch_drawn(const c10::OperatorHandle& op, Stack* stack, c10::Device device) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  std::optional<at::Tensor> filled;
  for (size_t i = 0; i < arguments.size(); ++i) {
    bool reads = false;
    each_tensor(given[i], [&](const at::Tensor& tensor) {
      reads = reads || !writes(arguments[i]) || filled;
      filled = tensor;
    });
    if (reads) {
      return false; // the numbers depend on values that are not there yet
    }
  }
  if (!filled || op.schema().returns().size() != 1) {
    return false;
  }
  const auto scratch = at::empty_strided(filled->sizes(), filled->strides(), filled->options().device(c10::kCPU));
  auto call = cpu_call(op, *stack, device, [&](const at::Tensor&) { return scratch; });
  {
    const KernelScope scope;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call);
  }
  if (scratch.sizes() != filled->sizes()) {
    filled->resize_(scratch.sizes());
  }
  launch(current_queue(device.index()), [scratch, place = Aliases(device, Owning::no).on_cpu(*filled)] {
    const KernelScope scope;
    place.copy_(scratch);
  });
  torch::jit::drop(*stack, arguments.size());
  stack->emplace_back(*filled);
  return true;
}

} // namespace

bool launch_late(const c10::OperatorHandle& op, Stack* stack, c10::Device device) {
  if (draws(op)) {
    return launch_drawn(op, stack, device);
  }
  if (!returns_tensors_only(op.schema())) {
    return false;
  }
  Shapes shapes;
  const auto results = shapes_of_results(op, *stack, shapes);
  if (!results) {
    return false;
  }
  bool plain = true; // each result is new, or an argument
  for (const auto& result : *results) {
    each_tensor(result, [&](const at::Tensor& shape) {
      plain = plain && (shapes.argument(shape) || !shapes.shares_memory(shape));
    });
  }
  if (!plain) {
    return false;
  }

  Aliases aliases(device, Owning::no);
  auto call = cpu_call(op, *stack, device, [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().is_cpu() ? as_of_now(tensor) : aliases.on_cpu(tensor);
  });
  std::vector<at::Tensor> places; // of results in order; none where one is an argument
  Stack made;
  for (const auto& result : *results) {
    made.push_back(with_tensors(result, [&](const at::Tensor& shape) {
      const auto* argument = shape.defined() ? shapes.argument(shape) : nullptr;
      if (!shape.defined() || argument) {
        places.emplace_back();
        return argument ? *argument : at::Tensor();
      }
      const auto tensor = on_device(shape, device);
      places.push_back(aliases.on_cpu(tensor));
      return tensor;
    }));
  }
  launch(current_queue(device.index()), [op, call, places]() mutable {
    const KernelScope scope;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call);
    auto place = places.begin();
    for (const auto& result : call) {
      with_tensors(result, [&](const at::Tensor& value) {
        if (value.defined() && place->defined()) {
          put(value, *place, op);
        }
        ++place;
        return value;
      });
    }
  });
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->insert(stack->end(), made.begin(), made.end());
  return true;
}

} // namespace vdev
