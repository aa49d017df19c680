// Recurrent layers as one operator: that of the CPU on the device's memory, with its own graph for the backward, as
// cuDNN has its reserve. Composed for a new backend their sums would be others than on the CPU.
#include "operators.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace vdev {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

variable_list tensors_of(const torch::jit::Stack& values) {
  variable_list tensors;
  for (const auto& value : values) {
    each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

// Of what autograd tracks, only a list of tensors passes; the rest of the call is here.
struct Layer : torch::autograd::Function<Layer> {
  static variable_list forward(AutogradContext* context, const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                               bool with_graph, c10::Device device, at::TensorList) {
    finish(current_queue(device.index()));
    Aliases aliases(device, Owning::yes);
    variable_list inputs;
    auto call = cpu_call(op, stack, device, [&](const at::Tensor& tensor) {
      auto alias = aliases.on_cpu(tensor);
      if (alias.defined()) {
        alias.set_requires_grad(with_graph && tensor.requires_grad());
        inputs.push_back(alias);
      }
      return alias;
    });
    {
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      const at::AutoGradMode graph(with_graph);
      op.callBoxed(call);
    }
    const auto outputs = tensors_of(call);
    context->saved_data["inputs"] = inputs;
    context->saved_data["outputs"] = outputs;
    variable_list results;
    for (const auto& output : outputs) {
      // Its storage becomes the device's; what the graph keeps of it sees the same memory.
      results.push_back(aliases.on_device(output.detach()));
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto inputs = context->saved_data["inputs"].toTensorVector();
    const auto outputs = context->saved_data["outputs"].toTensorVector();
    c10::Device device = resolved(std::nullopt);
    for (const auto& gradient : gradients) {
      device = gradient.defined() ? gradient.device() : device;
    }
    finish(current_queue(device.index()));
    Aliases aliases(device, Owning::yes);
    variable_list ends, given, wanted;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].requires_grad() && gradients[i].defined()) {
        ends.push_back(outputs[i]);
        given.push_back(aliases.on_cpu(gradients[i]));
      }
    }
    std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(wanted),
                 [](const at::Tensor& input) { return input.requires_grad(); });
    const auto found = torch::autograd::grad(ends, wanted, given, /*retain_graph=*/true, /*create_graph=*/false,
                                             /*allow_unused=*/true);
    variable_list results(4); // of the arguments that are no tensors
    auto next = found.begin();
    for (const auto& input : inputs) {
      results.push_back(input.requires_grad() ? aliases.on_device(*next++) : at::Tensor());
    }
    trace_kernel(device, "backward of a recurrent layer", gradients, results);
    return results;
  }
};

void on_layer_of_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = common_device(op, *stack);
  const auto count = op.schema().arguments().size();
  const auto given = torch::jit::pop(*stack, count);
  const auto tensors = tensors_of({given.begin(), given.end()});
  const auto results = Layer::apply(op, torch::jit::Stack(given.begin(), given.end()), at::GradMode::is_enabled(),
                                    device, at::TensorList(tensors));
  trace_kernel(device, op.schema().name(), tensors, results);
  stack->insert(stack->end(), results.begin(), results.end());
}

void register_layers(torch::Library& library) {
  for (const auto* name : {"lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data",
                           "rnn_relu.input", "rnn_relu.data", "lstm_cell", "gru_cell"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_layer_of_cpu>());
  }
}

} // namespace
} // namespace vdev

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  vdev::register_layers(m);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  vdev::register_layers(m);
}
