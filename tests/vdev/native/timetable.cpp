// When the tasks of the streams run: at once in normal mode; late, in an order that a seed draws, in delay mode.
#include "vdev.h"

#include <algorithm>
#include <random>
#include <set>

namespace vdev {
namespace {

// In delay mode one task runs at a time, under this lock, on whichever thread of the host lets the streams go on.
std::mutex g_timetable_lock;
std::atomic<bool> g_delayed{false};
std::optional<double> g_lateness; // of every stream; by default each one's is drawn
std::mt19937_64 g_chance;
std::exception_ptr g_failure; // of a late task; the next thread of the host that waits gets it
std::vector<std::function<void()>> g_spent;
std::vector<Queue*> g_used; // in this delay, in the order of their first use, whichever number they have

// Holds the lock; what tasks held is let go after it, since that may want Python's.
class Turn {
 public:
  Turn() : lock_(g_timetable_lock) {}
  Turn(const Turn&) = delete;
  ~Turn() {
    std::vector<std::function<void()>> spent;
    spent.swap(g_spent);
    lock_.unlock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

double drawn() {
  return std::uniform_real_distribution<double>(0, 1)(g_chance);
}

double drawn_lateness() {
  constexpr double choices[] = {0, 0.5, 0.9, 1, 1};
  return g_lateness ? *g_lateness : choices[g_chance() % 5];
}

bool can_run(const Queue& queue) {
  return !queue.waiting.empty() && reached(queue.waiting.front().after);
}

void run_next(Queue& queue) {
  auto task = std::move(queue.waiting.front());
  queue.waiting.pop_front();
  try {
    if (task.run) {
      task.run();
    }
  } catch (...) {
    if (!g_failure) {
      g_failure = std::current_exception();
    }
  }
  ++queue.done;
  g_spent.push_back(std::move(task.run));
}

void let_go_on() {
  for (auto* queue : g_used) {
    if (queue->waiting.empty()) {
      continue;
    }
    // A stream that lags or keeps up does so for a while.
    if (g_chance() % 16 == 0) {
      queue->lateness = drawn_lateness();
    }
    while (can_run(*queue) && drawn() >= queue->lateness) {
      run_next(*queue);
    }
  }
}

// What is waited for runs, with what it waits for; while it does, other streams may go on.
void run_until(const Mark& mark) {
  auto& queue = *mark.queue;
  while (queue.done < mark.position) {
    const auto after = queue.waiting.front().after;
    if (!reached(after)) {
      run_until(after);
      continue; // other tasks may have run meanwhile
    }
    run_next(queue);
    let_go_on();
  }
}

void raise_failure() {
  if (g_failure) {
    std::rethrow_exception(std::exchange(g_failure, nullptr));
  }
}

void push(Queue& queue, Task task) {
  if (std::find(g_used.begin(), g_used.end(), &queue) == g_used.end()) {
    g_used.push_back(&queue);
    queue.lateness = drawn_lateness();
  }
  queue.waiting.push_back(std::move(task));
  ++queue.enqueued;
  let_go_on();
}

// Streams that are waited for together go on by turns.
void drain(const std::function<bool(const Queue&)>& wanted) {
  for (;;) {
    std::vector<Queue*> busy;
    for (auto* queue : g_used) {
      if (wanted(*queue) && !queue->waiting.empty()) {
        busy.push_back(queue);
      }
    }
    if (busy.empty()) {
      return;
    }
    auto& queue = *busy[g_chance() % busy.size()];
    run_until({&queue, queue.done + 1});
  }
}

} // namespace

bool delayed() {
  return g_delayed;
}

void enter_delay(uint64_t seed, std::optional<double> lateness) {
  const Turn turn;
  TORCH_CHECK(!g_delayed, "the streams are delayed already; leave that first");
  g_chance.seed(seed);
  g_lateness = lateness;
  g_used.clear();
  g_delayed = true;
}

void leave_delay() {
  {
    const Turn turn;
    drain([](const Queue&) { return true; });
    g_delayed = false;
  }
  release_idle();
  const Turn turn;
  raise_failure();
}

void launch(Queue& queue, std::function<void()> run) {
  if (g_delayed) {
    const Turn turn;
    if (g_delayed) { // still
      push(queue, {std::move(run), {}});
      return;
    }
  }
  run();
  ++queue.done; // first: a stream that is not late has always done what is queued
  ++queue.enqueued;
}

void wait_on(Queue& queue, const Mark& mark) {
  if (!g_delayed || mark.queue == &queue) {
    return;
  }
  const Turn turn;
  if (g_delayed && !reached(mark)) {
    push(queue, {nullptr, mark});
  }
}

Mark end_of(Queue& queue) {
  return {&queue, queue.enqueued};
}

bool reached(const Mark& mark) {
  return mark.queue == nullptr || mark.queue->done >= mark.position;
}

bool poll(const Mark& mark) {
  if (tracing() && mark.queue != nullptr) { // a device may be behind whenever it is asked for the first time
    thread_local std::set<std::pair<Queue*, uint64_t>> asked;
    if (asked.emplace(mark.queue, mark.position).second) {
      return false;
    }
  }
  if (reached(mark)) {
    return true;
  }
  const Turn turn;
  if (!reached(mark)) {
    run_until({mark.queue, mark.queue->done + 1});
  }
  return false;
}

void reach(const Mark& mark) {
  if (!g_delayed) {
    return;
  }
  const Turn turn;
  if (!reached(mark)) {
    run_until(mark);
  }
  raise_failure();
}

void finish(Queue& queue) {
  reach(end_of(queue));
}

void finish_device(c10::DeviceIndex device) {
  if (!g_delayed) {
    return;
  }
  const Turn turn;
  drain([device](const Queue& queue) { return queue.device == device; });
  raise_failure();
}

} // namespace vdev
