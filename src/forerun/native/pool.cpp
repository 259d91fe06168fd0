#include "pool.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define FORERUN_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define FORERUN_PAUSE() __asm__ __volatile__("yield")
#else
#define FORERUN_PAUSE() ((void)0)
#endif

namespace forerun {
namespace {
constexpr int kSpins = 4000;             // some tens of microseconds; within a pass threads seldom wait longer
constexpr int kSpinsBetweenPasses = 20000;
}  // namespace

Pool::Pool(int num_threads) : size_(num_threads < 1 ? 1 : num_threads) {
  for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { loop(thread); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_.store(true);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  work_ = &work;
  running_.store(size_ - 1, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);   // a sleeper can't miss the change
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  work(0);
  for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpins) FORERUN_PAUSE(); else std::this_thread::yield();
  }
}

void Pool::loop(int thread) {
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen && spins < kSpinsBetweenPasses; ++spins) {
      if (closing_.load(std::memory_order_relaxed)) return;
      FORERUN_PAUSE();
    }
    if (round_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return closing_.load() || round_.load(std::memory_order_acquire) != seen; });
      if (closing_.load()) return;
    }
    seen = round_.load(std::memory_order_acquire);
    (*work_)(thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t now = barrier_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_.store(now + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; barrier_.load(std::memory_order_acquire) == now; ++spins) {
    if (spins < kSpins) FORERUN_PAUSE(); else std::this_thread::yield();   // a busy neighbour has our other thread
  }
}

}  // namespace forerun
