// Pinned memory of the host: plain memory that is known by its address.
#include "vdev.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>

namespace vdev {
namespace {

std::mutex g_pinned_lock;
std::map<const char*, size_t> g_ranges;
std::map<const char*, uint64_t> g_numbers;

void unpin(void* data) {
  {
    const std::lock_guard<std::mutex> guard(g_pinned_lock);
    g_ranges.erase(static_cast<const char*>(data));
  }
  c10::free_cpu(data);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &unpin, c10::kCPU};
    }
    auto* data = c10::alloc_cpu(bytes);
    if (delayed()) {
      std::memset(data, 0xFF, bytes); // NaN, so that a read before the copy that fills it shows
    }
    const std::lock_guard<std::mutex> guard(g_pinned_lock);
    g_ranges[static_cast<const char*>(data)] = bytes;
    g_numbers[static_cast<const char*>(data)] = next_block_number();
    return {data, data, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

} // namespace

c10::Allocator* pinned_allocator() {
  static Pinned pinned;
  return &pinned;
}

bool is_pinned(const void* data) {
  const std::lock_guard<std::mutex> guard(g_pinned_lock);
  const auto* address = static_cast<const char*>(data);
  auto range = g_ranges.upper_bound(address);
  if (address == nullptr || range == g_ranges.begin()) {
    return false;
  }
  --range;
  return address < range->first + range->second;
}

std::pair<uint64_t, const char*> pinned_block(const void* data) {
  const std::lock_guard<std::mutex> guard(g_pinned_lock);
  const auto* address = static_cast<const char*>(data);
  auto range = g_ranges.upper_bound(address);
  if (address == nullptr || range == g_ranges.begin()) {
    return {0, nullptr};
  }
  --range;
  if (address >= range->first + range->second) {
    return {0, nullptr};
  }
  return {g_numbers.at(range->first), range->first};
}

} // namespace vdev
