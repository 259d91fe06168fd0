#include "pool.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif
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
constexpr int kYields = 50;

long process() {
#if defined(_WIN32)
  return 0;                              // no fork there
#else
  return long(getpid());
#endif
}

}  // namespace

struct Pool::Team {
  const long owner = process();
  std::mutex mutex;
  std::condition_variable wake;          // a new round, or the end
  std::condition_variable go_on;         // inside a round
  std::vector<std::thread> threads;
};

Pool::Pool(int num_threads) : size_(num_threads < 1 ? 1 : num_threads) { start(); }

void Pool::start() {
  team_.reset(new Team);
  for (int thread = 1; thread < size_; ++thread) team_->threads.emplace_back([this, thread] { loop(thread); });
}

Pool::~Pool() {
  if (team_->owner != process()) {       // in a forked child the threads don't exist: never to be joined, nor unlocked
    (void)team_.release();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(team_->mutex);
    closing_.store(true);
  }
  team_->wake.notify_all();
  for (auto& thread : team_->threads) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (team_->owner != process()) {       // a forked child gets threads of its own
    (void)team_.release();
    round_.store(0);
    arrived_.store(0);
    sleepers_.store(0);
    start();
  }
  work_ = &work;
  running_.store(size_ - 1, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(team_->mutex);   // a sleeper can't miss the change
    round_.fetch_add(1, std::memory_order_release);
  }
  team_->wake.notify_all();
  work(0);
  wait([this] { return running_.load() == 0; });
}

void Pool::loop(int thread) {
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen && spins < kSpinsBetweenPasses; ++spins) {
      if (closing_.load(std::memory_order_relaxed)) return;
      FORERUN_PAUSE();
    }
    if (round_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(team_->mutex);
      team_->wake.wait(lock, [&] { return closing_.load() || round_.load(std::memory_order_acquire) != seen; });
      if (closing_.load()) return;
    }
    seen = round_.load(std::memory_order_acquire);
    (*work_)(thread);
    if (running_.fetch_sub(1) == 1) wake_sleepers();
  }
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t now = barrier_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_.store(now + 1);
    wake_sleepers();
    return;
  }
  wait([this, now] { return barrier_.load() != now; });
}

// Spins, then lets others run, then sleeps: where a busy neighbour has our other thread's core, it needs this one.
template <class Done> void Pool::wait(Done done) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (done()) return;
    FORERUN_PAUSE();
  }
  for (int yields = 0; yields < kYields; ++yields) {
    if (done()) return;
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(team_->mutex);
  sleepers_.fetch_add(1);
  team_->go_on.wait(lock, done);
  sleepers_.fetch_sub(1);
}

// After a change that `wait` waits for. Either this sees the sleeper, or the sleeper sees the change: both sides first
// write, then read, in the one order of sequentially consistent operations.
void Pool::wake_sleepers() {
  if (sleepers_.load() == 0) return;
  { std::lock_guard<std::mutex> lock(team_->mutex); }
  team_->go_on.notify_all();
}

}  // namespace forerun
