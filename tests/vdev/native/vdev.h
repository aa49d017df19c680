// What the parts of the backend know of each other: devices, streams, blocks of memory.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace vdev {

constexpr auto kVdev = c10::DeviceType::PrivateUse1;

// devices.cpp
void register_devices(int count);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::Device resolved(std::optional<c10::Device> device); // with an index: the current device's by default

// generators.cpp
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The generator of the CPU that draws for this one, as kernels of the CPU take no other.
at::Generator drawn_on_cpu(const std::optional<at::Generator>& given, c10::Device device);

// streams.cpp: a stream is a line of tasks; in normal mode each runs as it comes.
struct Queue;
struct Mark { // a place in a stream, reached when the tasks before it have run
  Queue* queue = nullptr;
  uint64_t position = 0;
};
struct Task {
  std::function<void()> run; // none: only waits
  Mark after;
};
struct Queue {
  c10::DeviceIndex device = 0;
  c10::StreamId id = 0;
  std::deque<Task> waiting; // guarded by the lock of the timetable
  std::atomic<uint64_t> enqueued{0};
  std::atomic<uint64_t> done{0};
  double lateness = 0;
};
Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream next_stream(c10::DeviceIndex device);
void create_streams(int devices);

// timetable.cpp: when the tasks of the streams run.
bool delayed();
void enter_delay(uint64_t seed, std::optional<double> lateness);
void leave_delay();
void launch(Queue& queue, std::function<void()> run);
void wait_on(Queue& queue, const Mark& mark);
Mark end_of(Queue& queue);
bool reached(const Mark& mark);
bool poll(const Mark& mark); // what it says is followed by one step, so that a caller who asks again gets there
void reach(const Mark& mark); // the host waits
void finish(Queue& queue);
void finish_device(c10::DeviceIndex device);

// events.cpp
void record_event(void** event, Queue& queue, bool timed);
void wait_event(void* event, Queue& queue);
bool query_event(void* event);
void synchronize_event(void* event);
double elapsed_milliseconds(void* from, void* to);
void destroy_event(void* event);

// memory.cpp
std::pair<uint64_t, const char*> block_number(const c10::DataPtr& data); // and where it begins; 0 for none
struct Usage {
  int64_t now = 0;
  int64_t peak = 0;
};
c10::Allocator* allocator();
at::DataPtr adopt(at::DataPtr data, size_t bytes, c10::DeviceIndex device); // memory that a kernel of the CPU made
void use_on_stream(const c10::DataPtr& data, Queue& queue);
Usage usage(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, std::optional<int64_t> bytes);
void release_idle(); // hands what is free back to the system
void create_ledgers(int devices);

// pinned.cpp
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
std::pair<uint64_t, const char*> pinned_block(const void* data);

// trace.cpp
struct Access {
  uint64_t block = 0; // each allocation has its own number
  int64_t from = 0;   // bytes in it
  int64_t to = 0;
  bool writes = false;
};
bool tracing();
void start_trace(bool stacks);
void stop_trace();
uint64_t begin_call(); // of autograd's engine, by the calling thread
void end_call(uint64_t number);
Access access_of(const at::Tensor& tensor, bool writes);
void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes);
void trace(const char* kind, const Queue* queue, uint64_t object = 0, std::string name = "",
           std::vector<Access> accesses = {}, const Queue* other = nullptr);
uint64_t next_block_number();
void trace_kernel(c10::Device device, const std::string& name, at::TensorList read, at::TensorList written);

void register_operators(); // operators.cpp

} // namespace vdev
