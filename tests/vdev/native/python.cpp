// What Python sees of the backend.
#include "vdev.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>

namespace {

// Its threads are started before the first backward, one a device that is known by then.
struct Engine : torch::autograd::Engine {
  static void start_threads(int devices) {
    auto leaf = at::ones({1}).requires_grad_();
    leaf.sum().backward(); // starts them, if no backward has run in this process
    auto& engine = torch::autograd::Engine::get_default_engine();
    const auto threads = (engine.*(&Engine::device_ready_queues_)).size();
    if (threads == 0) {
      (engine.*(&Engine::start_device_threads))();
      return;
    }
    TORCH_CHECK(int(threads) >= devices, "autograd runs on ", threads, " devices since its first backward, so ",
                devices, " devices of vdev have to be loaded before it");
  }
};

std::pair<int64_t, int64_t> memory(c10::DeviceIndex device) {
  const auto usage = vdev::usage(device);
  return {usage.now, usage.peak};
}

py::object place(const vdev::Queue* queue) {
  return queue == nullptr ? py::object(py::none()) : py::object(py::make_tuple(int(queue->device), int(queue->id)));
}

py::list taken() {
  py::list records;
  for (const auto& one : vdev::g_taken) {
    py::list accesses;
    for (const auto& access : one.accesses) {
      accesses.append(py::make_tuple(access.block, access.from, access.to, access.writes));
    }
    records.append(py::make_tuple(one.kind, place(one.queue), place(one.other), one.object, one.name, accesses,
                                  one.host, one.thread, one.made_on, one.number, one.node));
  }
  return records;
}

std::vector<std::tuple<std::string, std::string, uint64_t>> stack_of(size_t index) {
  std::vector<std::tuple<std::string, std::string, uint64_t>> frames;
  const auto& stack = vdev::g_taken.at(index).stack;
  if (stack) {
    const auto symbols = torch::symbolize({stack.get()});
    for (const auto frame : symbols.tracebacks.at(0)) {
      const auto& one = symbols.all_frames.at(frame);
      frames.emplace_back(one.filename, one.funcname, one.lineno);
    }
  }
  return frames;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using unlocked = py::call_guard<py::gil_scoped_release>; // what may wait for a task
  m.def("register_devices", &vdev::register_devices);
  m.def("start_autograd_threads", &Engine::start_threads, unlocked());
  m.def("device_count", &vdev::device_count);
  m.def("current_device", &vdev::current_device);
  m.def("set_device", &vdev::set_current_device);
  m.def("default_generator", [](int device) { return vdev::default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("memory", &memory);
  m.def("reset_peak", &vdev::reset_peak);
  m.def("set_capacity", &vdev::set_capacity);
  m.def("delayed", &vdev::delayed);
  m.def("tracing", &vdev::tracing);
  m.def("start_trace", &vdev::start_trace);
  m.def("stop_trace", &vdev::stop_trace, unlocked());
  m.def("put", [](uint64_t edge) { vdev::trace("puts", nullptr, edge); });
  m.def("get", [](uint64_t edge) { vdev::trace("gets", nullptr, edge); });
  m.def("begin_call", &vdev::begin_call);
  m.def("end_call", &vdev::end_call);
  m.def("trace", &taken);
  m.def("stack", &stack_of);
  m.def("enter_delay", &vdev::enter_delay, unlocked());
  m.def("leave_delay", &vdev::leave_delay, unlocked());
}
