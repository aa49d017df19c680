// Events: the place in a stream where one was recorded last.
#include "vdev.h"

#include <chrono>

namespace vdev {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  std::mutex lock; // recorded by one thread while another waits
  Mark mark;
  bool timed = false;
  std::shared_ptr<Clock::time_point> passed; // written when the stream gets there
};

} // namespace

void record_event(void** event, Queue& queue, bool timed) {
  if (*event == nullptr) {
    *event = new Event();
  }
  auto& recorded = *static_cast<Event*>(*event);
  trace("record", &queue, uint64_t(*event));
  auto passed = std::make_shared<Clock::time_point>();
  launch(queue, [passed] { *passed = Clock::now(); });
  const std::lock_guard<std::mutex> guard(recorded.lock);
  recorded.mark = end_of(queue);
  recorded.timed = timed;
  recorded.passed = std::move(passed);
}

namespace {

Mark mark_of(void* event) {
  if (event == nullptr) { // never recorded: nothing to wait for
    return {};
  }
  auto& recorded = *static_cast<Event*>(event);
  const std::lock_guard<std::mutex> guard(recorded.lock);
  return recorded.mark;
}

} // namespace

void wait_event(void* event, Queue& queue) {
  if (event != nullptr) {
    trace("wait", &queue, uint64_t(event));
  }
  wait_on(queue, mark_of(event));
}

bool query_event(void* event) {
  const bool passed = poll(mark_of(event));
  if (passed && event != nullptr) {
    trace("host waits for event", nullptr, uint64_t(event));
  }
  return passed;
}

void synchronize_event(void* event) {
  reach(mark_of(event));
  if (event != nullptr) {
    trace("host waits for event", nullptr, uint64_t(event));
  }
}

double elapsed_milliseconds(void* from, void* to) {
  auto* first = static_cast<Event*>(from);
  auto* last = static_cast<Event*>(to);
  TORCH_CHECK(first && last && first->passed && last->passed,
              "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK(first->timed && last->timed, "Both events must be created with argument 'enable_timing=True'.");
  TORCH_CHECK(reached(first->mark) && reached(last->mark),
              "Both events must be completed before calculating elapsed time.");
  return std::chrono::duration<double, std::milli>(*last->passed - *first->passed).count();
}

void destroy_event(void* event) {
  delete static_cast<Event*>(event);
}

} // namespace vdev
