// Splits independent tasks among the calling thread and XLA's intra-op pool.
// Tasks are handed out one by one, so a core that others use slows nobody down. The caller waits
// only for tasks that a helper has begun, never for a helper that has not woken up yet.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

template <typename F>
struct Job {
  const F* run;
  int64_t tasks;
  std::atomic<int64_t> next{0}, done{0};
  std::atomic<int> owners;

  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      (*run)(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
  void leave() {
    if (owners.fetch_sub(1) == 1) delete this;
  }
};

// Calls run(i) once for every i in [0, tasks).
template <typename F>
void parallel(ffi::ThreadPool& pool, int64_t tasks, const F& run) {
  int64_t helpers = std::min<int64_t>(pool.num_threads(), tasks) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < tasks; ++i) run(i);
    return;
  }
  auto* job = new Job<F>{&run, tasks};
  job->owners = int(helpers) + 1;
  for (int64_t h = 0; h < helpers; ++h) {
    pool.Schedule([job] {
      job->work();
      job->leave();
    });
  }
  job->work();
  for (int spin = 0; job->done.load(std::memory_order_acquire) < tasks; ++spin) {
    if (spin > 1000) std::this_thread::yield();
  }
  job->leave();
}

// How many tasks to cut `work` into: a multiple of the threads, so that even cores stay even, up to four
// each, so that uneven ones do too, but none smaller than `least`.
inline int64_t tasks_for(ffi::ThreadPool& pool, int64_t work, int64_t least) {
  int64_t threads = std::max<int64_t>(1, pool.num_threads());
  return threads * std::clamp<int64_t>(work / (threads * least), 1, 4);
}
