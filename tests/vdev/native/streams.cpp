// Which streams there are, and which one a thread is on: a default one and a pool of others a device, as on CUDA.
#include "vdev.h"

namespace vdev {
namespace {

constexpr int kPool = 32; // a stream that is asked for beyond these is one of them again

std::vector<Queue*> g_queues; // of a device: the default one, then the pool; they live as long as the process
std::vector<std::atomic<uint64_t>> g_handed_out;
thread_local std::vector<c10::StreamId> t_streams;

} // namespace

void create_streams(int devices) {
  g_handed_out = std::vector<std::atomic<uint64_t>>(devices);
  for (int device = 0; device < devices; ++device) {
    for (int id = 0; id <= kPool; ++id) {
      auto* queue = new Queue();
      queue->device = static_cast<c10::DeviceIndex>(device);
      queue->id = id;
      g_queues.push_back(queue);
    }
  }
}

Queue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kVdev && stream.id() >= 0 && stream.id() <= kPool, "not a stream of vdev: ",
              stream);
  return *g_queues[stream.device_index() * (kPool + 1) + stream.id()];
}

Queue& current_queue(c10::DeviceIndex device) {
  return queue_of(current_stream(device));
}

c10::Stream current_stream(c10::DeviceIndex device) {
  t_streams.resize(device_count(), 0);
  return c10::Stream(c10::Stream::UNSAFE, {kVdev, device}, t_streams.at(device));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const auto before = current_stream(stream.device_index());
  t_streams.at(stream.device_index()) = queue_of(stream).id;
  return before;
}

c10::Stream next_stream(c10::DeviceIndex device) {
  const auto number = g_handed_out.at(device)++;
  return c10::Stream(c10::Stream::UNSAFE, {kVdev, device}, static_cast<c10::StreamId>(1 + number % kPool));
}

} // namespace vdev
