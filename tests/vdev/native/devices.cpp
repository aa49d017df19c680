// The devices themselves: how many there are, which one a thread is on, and what torch asks of an accelerator.
#include "vdev.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace vdev {
namespace {

std::atomic<c10::DeviceIndex> g_count{0};
thread_local c10::DeviceIndex t_current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kVdev; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device getDevice() const override { return {kVdev, t_current}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = t_current;
    set_current_device(device.index());
    return {kVdev, before};
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(resolved(device).index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolved(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return next_stream(resolved(device).index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return next_stream(resolved(device).index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream);
    const bool passed = poll(end_of(queue));
    if (passed) {
      trace("host waits for stream", &queue);
    }
    return passed;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(queue_of(stream));
    trace("host waits for stream", &queue_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    finish_device(device < 0 ? t_current : device);
    trace("host waits for device", nullptr, uint64_t(device < 0 ? t_current : device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on_stream(data, queue_of(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    record_event(event, queue_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override { wait_event(event, queue_of(stream)); }
  bool queryEvent(void* event) const override { return query_event(event); }
  void synchronizeEvent(void* event) const override { synchronize_event(event); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { destroy_event(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return elapsed_milliseconds(from, to);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return t_current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = t_current;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? t_current : exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? t_current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? t_current : index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    // What is kept of the old block is copied by the host.
    if (delayed() && bytes > 0 && storage.nbytes() > 0) {
      finish(current_queue(storage.device().index()));
    }
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace

c10::DeviceIndex device_count() {
  return g_count;
}

c10::DeviceIndex current_device() {
  return t_current;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < g_count, "vdev error: invalid device ordinal: vdev:", int(index), " of ",
              int(g_count), " devices");
  t_current = index;
}

c10::Device resolved(std::optional<c10::Device> device) {
  const auto index = device && device->has_index() ? device->index() : t_current;
  TORCH_CHECK(index < g_count, "vdev error: invalid device ordinal: vdev:", int(index), " of ", int(g_count),
              " devices");
  return {kVdev, index};
}

void register_devices(int count) {
  g_count = static_cast<c10::DeviceIndex>(count);
  create_streams(count);
  create_ledgers(count);
  // Torch keeps these for the life of the process.
  static c10::impl::DeviceGuardImplRegistrar registrar(kVdev, new Guard());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kVdev, allocator());
  register_operators();
}

} // namespace vdev
