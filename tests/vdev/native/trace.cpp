// Records what is queued, for the check of races: kernels with the memory they touch, waits, allocations and frees.
#include "operators.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <pthread.h>

namespace vdev {
namespace {

struct Record {
  const char* kind;
  const Queue* queue;
  const Queue* other;
  uint64_t object; // an event, a block, a device, or an edge between hosts
  std::string name;
  std::vector<Access> accesses;
  uint64_t host;   // see host()
  uint64_t thread;
  uint64_t made_on; // of the node of autograd that launched it, else of the node that a forward has just made
  int64_t number;
  std::string node;
  std::shared_ptr<torch::CapturedTraceback> stack;
};

std::atomic<bool> g_tracing{false};
std::mutex g_trace_lock; // the innermost: nothing is waited for under it
std::vector<Record> g_records;
std::vector<Record> g_taken;
at::CallbackHandle g_watch = at::INVALID_CALLBACK_HANDLE;
bool g_stacks = true;
thread_local int t_in_kernel = 0;

// A call of autograd's engine. Autograd has one thread per device, which runs nodes of several calls by turns, and
// nothing but that thread orders those calls. So each call counts as a host of its own on each thread that it did not
// start on. The mark of a call travels as torch's settings of a thread do, from the caller to the threads of autograd.
struct Call final : c10::DebugInfoBase {
  explicit Call(uint64_t number) : number(number) {}
  uint64_t number;
};
std::atomic<uint64_t> g_last_host{0};
thread_local std::vector<std::pair<uint64_t, uint64_t>> t_started; // calls of this thread, and the host of each
thread_local std::map<uint64_t, uint64_t> t_hosts;                 // by call; of 0 for the thread itself
thread_local uint64_t t_host = 0;

// The host that the calling thread is now. Between two nodes, a thread of autograd lets go of what the last one used.
uint64_t host() {
  const auto* call = dynamic_cast<Call*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
  if (call == nullptr && t_host != 0) {
    return t_host;
  }
  const auto number = call == nullptr ? 0 : call->number;
  for (const auto& [started, own] : t_started) {
    if (started == number) {
      return t_host = own;
    }
  }
  auto& known = t_hosts[number];
  if (known == 0) {
    known = ++g_last_host;
    if (number != 0) {
      const std::lock_guard<std::mutex> guard(g_trace_lock);
      Record begins{"joins call", nullptr, nullptr, number};
      begins.host = known;
      g_records.push_back(std::move(begins));
    }
  }
  return t_host = known;
}

bool reads_or_writes(const c10::OperatorHandle& op) {
  static const std::set<std::string> none = {"aten::set_", "aten::resize_", "aten::is_pinned", "aten::detach",
                                             "aten::alias", "aten::record_stream", "aten::_pin_memory"};
  const auto& name = op.schema().name();
  return name == "aten::copy_" || (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && none.count(name) == 0);
}

// What the host itself computes, on pinned memory: that alone do streams touch beside it.
std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (t_in_kernel > 0 || !tracing()) {
    return nullptr;
  }
  bool pinned = false, devices = false;
  for (const auto& value : function.inputs()) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      devices = devices || tensor.device().type() == kVdev;
      pinned = pinned || (!devices && access_of(tensor, false).block != 0);
    });
  }
  const auto name = function.operator_name();
  if (!pinned || devices || !name) {
    return nullptr;
  }
  const auto op = c10::Dispatcher::singleton().findOp(*name);
  if (!op || !op->hasSchema() || !reads_or_writes(*op)) {
    return nullptr;
  }
  for (const auto& result : op->schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return nullptr; // a view
    }
  }
  std::vector<Access> accesses;
  const auto& arguments = op->schema().arguments();
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size() && i < arguments.size(); ++i) {
    each_tensor(inputs[i], [&](const at::Tensor& tensor) { add_access(accesses, tensor, writes(arguments[i])); });
  }
  trace("host", nullptr, 0, op->schema().name(), std::move(accesses));
  return nullptr;
}

} // namespace

bool tracing() {
  return g_tracing;
}

KernelDepth::KernelDepth() {
  ++t_in_kernel;
}
KernelDepth::~KernelDepth() {
  --t_in_kernel;
}

Access access_of(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0 ||
      tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage() ||
      (tensor.device().type() != kVdev && !tensor.device().is_cpu())) {
    return {};
  }
  const auto& data = tensor.storage().data_ptr();
  auto [block, base] = tensor.device().is_cpu() ? pinned_block(data.get()) : block_number(data);
  if (block == 0) {
    return {};
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const auto item = int64_t(tensor.dtype().itemsize());
  const auto from = static_cast<const char*>(data.get()) - base + tensor.storage_offset() * item;
  return {block, from, from + (last + 1) * item, writes};
}

void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  const auto access = access_of(tensor, writes);
  if (access.block != 0) {
    accesses.push_back(access);
  }
}

void trace(const char* kind, const Queue* queue, uint64_t object, std::string name, std::vector<Access> accesses,
           const Queue* other) {
  if (!tracing()) {
    return;
  }
  Record record{kind, queue, other, object, std::move(name), std::move(accesses), host(), uint64_t(pthread_self())};
  if (const auto node = torch::autograd::get_current_node()) {
    record.node = node->name();
    record.made_on = node->thread_id();
    record.number = int64_t(node->sequence_nr());
  } else {
    record.made_on = at::RecordFunction::currentThreadId();
    record.number = int64_t(at::sequence_number::peek()) - 1;
  }
  if (g_stacks) {
    record.stack = torch::CapturedTraceback::gather(true, false, false); // wants Python's lock
  }
  const std::lock_guard<std::mutex> guard(g_trace_lock);
  g_records.push_back(std::move(record));
}

void trace_kernel(c10::Device device, const std::string& name, at::TensorList read, at::TensorList written) {
  if (!tracing()) {
    return;
  }
  std::vector<Access> accesses;
  for (const auto& tensor : read) {
    add_access(accesses, tensor, false);
  }
  for (const auto& tensor : written) {
    add_access(accesses, tensor, true);
  }
  trace("kernel", &current_queue(device.index()), 0, name, std::move(accesses));
}

void start_trace(bool stacks) {
  g_stacks = stacks;
  {
    const std::lock_guard<std::mutex> guard(g_trace_lock);
    g_records.clear();
  }
  g_tracing = true;
  g_watch = at::addGlobalCallback(at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes(
      {at::RecordScope::FUNCTION}));
}

void stop_trace() {
  g_tracing = false;
  at::removeCallback(g_watch);
  const std::lock_guard<std::mutex> guard(g_trace_lock);
  g_taken = std::move(g_records);
  g_records.clear();
}

uint64_t begin_call() {
  const auto number = ++g_last_host; // no host has it
  const auto own = host();
  trace("calls", nullptr, number);
  t_started.emplace_back(number, own);
  c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::TEST_INFO, std::make_shared<Call>(number));
  return number;
}

void end_call(uint64_t number) {
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO);
  t_host = t_started.back().second;
  t_started.pop_back();
  trace("returns", nullptr, number);
}

} // namespace vdev
