// Operators: every one that has a kernel for the CPU runs that kernel on the device's memory.
#include "operators.h"

#include <ATen/core/op_registration/op_registration.h>

#include <set>

namespace vdev {
namespace {

// On CUDA too these take indices, or the lengths of packed sequences, from the host.
bool takes_host_tensors(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {"aten::index", "aten::index_put", "aten::index_put_",
                                              "aten::_index_put_impl_", "aten::lstm", "aten::gru",
                                              "aten::rnn_tanh", "aten::rnn_relu"};
  return names.count(op.schema().name()) > 0;
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& argument, c10::Device one, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "! (when checking argument for argument ", argument, " in method ", op.operator_name(), ")");
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

void run_at_once(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  const auto& arguments = op.schema().arguments();
  Aliases aliases(device, Owning::yes);
  auto call = cpu_call(op, *stack, device, [&](const at::Tensor& tensor) { return aliases.on_cpu(tensor); });
  std::vector<c10::IValue> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (writes(arguments[i])) {
      written.push_back(call[i]);
    }
  }
  {
    const KernelScope scope;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call);
  }
  for (const auto& argument : written) {
    each_tensor(argument, [&](const at::Tensor& alias) { aliases.take_over_shape(alias); });
  }
  torch::jit::drop(*stack, arguments.size());
  for (const auto& result : call) {
    stack->push_back(with_tensors(result, [&](const at::Tensor& tensor) { return aliases.on_device(tensor); }));
  }
}

// Operators whose kernels for several backends differ, and which only compose others for a new one: here they compose
// as they do on the CPU.
const std::set<std::string>& composed_on_cpu() {
  static const std::set<std::string> names = {"aten::convolution", "aten::convolution_backward"};
  return names;
}

torch::Library& library() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  return library;
}

} // namespace

c10::Device common_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(stack, arguments.size());
  std::optional<c10::Device> device;
  std::optional<c10::Device> asked;
  for (size_t i = 0; i < arguments.size(); ++i) {
    each_tensor(given[i], [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kVdev && device && tensor.device() != *device) {
        refuse(op, arguments[i].name(), *device, tensor.device());
      }
      if (tensor.device().type() == kVdev) {
        device = tensor.device();
      }
    });
    if (given[i].isDevice()) {
      asked = given[i].toDevice();
    }
  }
  for (size_t i = 0; device && i < arguments.size(); ++i) {
    each_tensor(given[i], [&](const at::Tensor& tensor) {
      const bool read_as_number = tensor.dim() == 0 && !writes(arguments[i]);
      if (tensor.device() != *device && !read_as_number && !takes_host_tensors(op)) {
        refuse(op, arguments[i].name(), *device, tensor.device());
      }
    });
  }
  return device ? *device : resolved(asked);
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

torch::jit::Stack cpu_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack, c10::Device device,
                           const OnTensor& change) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(stack, arguments.size());
  torch::jit::Stack call;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto kind = arguments[i].type()->str();
    if (kind.rfind("Generator", 0) == 0) {
      call.emplace_back(drawn_on_cpu(given[i].toOptional<at::Generator>(), device));
    } else if (given[i].isDevice()) {
      call.emplace_back(c10::Device(c10::kCPU));
    } else {
      call.push_back(with_tensors(given[i], change));
    }
  }
  return call;
}

namespace {

// The names of those that the host waits for on CUDA too, as their results have no shape before.
bool host_waits(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {"aten::nonzero", "aten::masked_select", "aten::_unique2",
                                              "aten::unique_dim", "aten::unique_consecutive"};
  return !returns_tensors_only(op.schema()) || names.count(op.schema().name()) > 0;
}

void run_or_launch(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device);

} // namespace

void on_kernels_of_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = common_device(op, *stack);
  if (!tracing() || is_view(op.schema())) {
    run_or_launch(op, stack, device);
    return;
  }
  const auto& arguments = op.schema().arguments();
  const auto held = torch::jit::last(*stack, arguments.size()).vec();
  std::vector<Access> accesses;
  for (size_t i = 0; i < held.size(); ++i) {
    each_tensor(held[i], [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kVdev) {
        add_access(accesses, tensor, writes(arguments[i]));
      }
    });
  }
  const auto inputs = accesses.size();
  run_or_launch(op, stack, device);
  for (const auto& result : torch::jit::last(*stack, op.schema().returns().size())) {
    each_tensor(result, [&](const at::Tensor& tensor) {
      const auto made = access_of(tensor, true);
      const bool known = std::any_of(accesses.begin(), accesses.begin() + int64_t(inputs),
                                     [&](const Access& one) { return one.block == made.block; });
      if (made.block != 0 && !known) {
        accesses.push_back(made);
      }
    });
  }
  trace("kernel", &current_queue(device.index()), 0, op.schema().name(), std::move(accesses));
  if (host_waits(op)) {
    trace("host waits for stream", &current_queue(device.index()));
  }
}

namespace {

void run_or_launch(const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::Device device) {
  if (!delayed() || is_view(op.schema())) {
    run_at_once(op, stack, device);
    return;
  }
  // A kernel from elsewhere may be Python, which no other thread must wait for.
  if (op.schema().name().rfind("aten::", 0) != 0 || !launch_late(op, stack, device)) {
    finish(current_queue(device.index()));
    run_at_once(op, stack, device);
  }
}

} // namespace

void register_operators() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    // Else one that composes itself would do so otherwise than on the CPU, whose kernel is whole.
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || composed_on_cpu().count(name.name)) {
      const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_kernels_of_cpu>());
    }
  }
}

} // namespace vdev

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&vdev::on_kernels_of_cpu>());
}
