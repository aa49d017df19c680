// The memory of the devices: blocks of the host's, counted by device, capped, and handed out again as the caching
// allocator of CUDA does.
#include "vdev.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstring>
#include <sstream>

namespace vdev {
namespace {

constexpr size_t kGrain = 512; // blocks of one size class serve each other, as on CUDA

struct Block {
  void* data = nullptr;
  size_t bytes = 0; // as asked for, and counted
  size_t room = 0;
  uint64_t number = 0; // another one for each allocation
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0; // the stream it was allocated on, which alone gets it at once when it is free
  std::vector<Queue*> users; // other streams that record_stream named
  std::vector<Mark> pending; // where these stood when it was freed
  c10::DataPtr adopted;      // its memory, where a kernel of the CPU allocated it

  ~Block() {
    if (data != nullptr && !adopted) {
      c10::free_cpu(data);
    }
  }
};
using Owned = std::unique_ptr<Block>;

struct Ledger {
  Usage usage;
  std::optional<int64_t> capacity;
  int64_t pending_bytes = 0;
  std::vector<Owned> pending; // freed, but streams that record_stream named are not through with them
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Owned>> idle; // the last freed is handed out first
  std::vector<Owned> adopted; // freed in delay mode: late tasks may still write there
};

std::mutex g_lock;
std::vector<Ledger> g_ledgers;

void count_in(Ledger& ledger, const Block& block) {
  ledger.usage.now += int64_t(block.bytes);
  ledger.usage.peak = std::max(ledger.usage.peak, ledger.usage.now);
}

std::string readable(int64_t bytes) {
  constexpr const char* units[] = {"bytes", "KiB", "MiB", "GiB"};
  double amount = double(bytes);
  int unit = 0;
  for (; amount >= 1024 && unit < 3; ++unit) {
    amount /= 1024;
  }
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(unit == 0 ? 0 : 2);
  text << amount << ' ' << units[unit];
  return text.str();
}

bool fits(const Ledger& ledger, size_t bytes) {
  return !ledger.capacity || ledger.usage.now + ledger.pending_bytes + int64_t(bytes) <= *ledger.capacity;
}

void check_capacity(const Ledger& ledger, size_t bytes, c10::DeviceIndex device) {
  if (fits(ledger, bytes)) {
    return;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, "vdev out of memory. Tried to allocate ", readable(int64_t(bytes)), ". vdev:",
                   int(device), " has a total capacity of ", readable(*ledger.capacity), " of which ",
                   readable(std::max<int64_t>(0, *ledger.capacity - ledger.usage.now)), " is free; ",
                   readable(ledger.usage.now), " is in use.");
}

void put_by(Ledger& ledger, Owned block) {
  if (!delayed()) {
    return; // nothing late can touch it
  }
  if (block->adopted) {
    ledger.adopted.push_back(std::move(block));
  } else {
    ledger.idle[{block->stream, block->room}].push_back(std::move(block));
  }
}

void collect_pending(Ledger& ledger) {
  auto still = std::vector<Owned>();
  for (auto& block : ledger.pending) {
    if (std::all_of(block->pending.begin(), block->pending.end(), reached)) {
      ledger.pending_bytes -= int64_t(block->bytes);
      put_by(ledger, std::move(block));
    } else {
      still.push_back(std::move(block));
    }
  }
  ledger.pending = std::move(still);
}

void free_block(void* context) {
  Owned block(static_cast<Block*>(context));
  trace("free", &queue_of(c10::Stream(c10::Stream::UNSAFE, {kVdev, block->device}, block->stream)), block->number);
  const std::lock_guard<std::mutex> guard(g_lock);
  auto& ledger = g_ledgers[block->device];
  ledger.usage.now -= int64_t(block->bytes);
  for (auto* user : block->users) {
    block->pending.push_back(end_of(*user));
  }
  if (std::all_of(block->pending.begin(), block->pending.end(), reached)) {
    put_by(ledger, std::move(block));
  } else {
    ledger.pending_bytes += int64_t(block->bytes);
    ledger.pending.push_back(std::move(block));
  }
}

c10::DataPtr handed_out(Ledger& ledger, Owned block) {
  count_in(ledger, *block);
  block->number = next_block_number();
  auto* kept = block.release();
  return {kept->data, kept, &free_block, {kVdev, kept->device}};
}

// Memory that waits for streams is not free yet; short of memory, the host waits for them, as on CUDA.
void wait_for_pending(c10::DeviceIndex device) {
  std::vector<Mark> marks;
  {
    const std::lock_guard<std::mutex> guard(g_lock);
    for (const auto& block : g_ledgers[device].pending) {
      marks.insert(marks.end(), block->pending.begin(), block->pending.end());
    }
  }
  for (const auto& mark : marks) {
    reach(mark);
  }
}

Owned fresh_block(size_t bytes, c10::DeviceIndex device, c10::StreamId stream) {
  auto block = std::make_unique<Block>();
  block->room = (bytes + kGrain - 1) / kGrain * kGrain;
  block->data = c10::alloc_cpu(block->room);
  block->device = device;
  block->stream = stream;
  if (delayed()) {
    std::memset(block->data, 0xFF, block->room); // NaN, so that a read before the first write shows
  }
  return block;
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  if (bytes == 0) {
    return {nullptr, nullptr, &free_block, {kVdev, device}};
  }
  const auto stream = current_stream(device).id();
  std::unique_lock<std::mutex> guard(g_lock);
  auto& ledger = g_ledgers[device];
  collect_pending(ledger);
  if (!fits(ledger, bytes) && !ledger.pending.empty()) {
    guard.unlock();
    wait_for_pending(device);
    guard.lock();
    collect_pending(ledger);
  }
  check_capacity(ledger, bytes, device);
  auto& idle = ledger.idle[{stream, (bytes + kGrain - 1) / kGrain * kGrain}];
  Owned block;
  if (idle.empty()) {
    block = fresh_block(bytes, device, stream);
  } else {
    block = std::move(idle.back());
    idle.pop_back();
    block->users.clear();
    block->pending.clear();
  }
  block->bytes = bytes;
  auto data = handed_out(ledger, std::move(block));
  guard.unlock();
  trace("alloc", &current_queue(device), static_cast<Block*>(data.get_context())->number);
  return data;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_on_stream(data, queue_of(stream)); }

  // Torch has had it with and without the pool.
  void emptyCache() {}
  void emptyCache(std::pair<unsigned long long, unsigned long long>) {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto total = usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = total.now; // of all size classes together
      (*bytes)[0].peak = total.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

} // namespace

void create_ledgers(int devices) {
  g_ledgers = std::vector<Ledger>(devices);
}

c10::Allocator* allocator() {
  static Allocator allocator;
  return &allocator;
}

at::DataPtr adopt(at::DataPtr data, size_t bytes, c10::DeviceIndex device) {
  if (bytes == 0 || data.get() == nullptr) {
    return {nullptr, nullptr, &free_block, {kVdev, device}};
  }
  auto block = std::make_unique<Block>();
  block->data = data.get();
  block->bytes = block->room = bytes;
  block->device = device;
  block->adopted = std::move(data);
  block->stream = current_stream(device).id();
  at::DataPtr made;
  {
    const std::lock_guard<std::mutex> guard(g_lock);
    auto& ledger = g_ledgers.at(device);
    check_capacity(ledger, bytes, device);
    made = handed_out(ledger, std::move(block));
  }
  trace("alloc", &current_queue(device), static_cast<Block*>(made.get_context())->number);
  return made;
}

void use_on_stream(const c10::DataPtr& data, Queue& queue) {
  auto* block = block_of(data);
  if (block != nullptr) {
    trace("use", &queue, block->number);
  }
  const std::lock_guard<std::mutex> guard(g_lock);
  if (block == nullptr || (queue.device == block->device && queue.id == block->stream)) {
    return;
  }
  if (std::find(block->users.begin(), block->users.end(), &queue) == block->users.end()) {
    block->users.push_back(&queue);
  }
}

std::pair<uint64_t, const char*> block_number(const c10::DataPtr& data) {
  auto* block = block_of(data);
  return block == nullptr ? std::pair<uint64_t, const char*>{0, nullptr}
                          : std::pair<uint64_t, const char*>{block->number, static_cast<const char*>(block->data)};
}

uint64_t next_block_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

Usage usage(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> guard(g_lock);
  return g_ledgers.at(device).usage;
}

void reset_peak(c10::DeviceIndex device) {
  const std::lock_guard<std::mutex> guard(g_lock);
  auto& usage = g_ledgers.at(device).usage;
  usage.peak = usage.now;
}

void set_capacity(c10::DeviceIndex device, std::optional<int64_t> bytes) {
  const std::lock_guard<std::mutex> guard(g_lock);
  g_ledgers.at(device).capacity = bytes;
}

void release_idle() {
  const std::lock_guard<std::mutex> guard(g_lock);
  for (auto& ledger : g_ledgers) {
    collect_pending(ledger);
    ledger.idle.clear();
    ledger.adopted.clear();
  }
}

} // namespace vdev
