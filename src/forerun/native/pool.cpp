#include "pool.h"

#include <map>

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
constexpr int kSpinsInPass = 2000;         // some tens of microseconds; threads in step seldom wait longer
constexpr int kSpinsBetweenPasses = 20000; // the caller samples and plans in between

long this_process() {
#if defined(_WIN32)
  return 0;                               // no fork there
#else
  return long(getpid());
#endif
}

}  // namespace

void Signal::raise() {
  value_.fetch_add(1);                    // sequentially consistent, as are the two lines on sleepers_
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
}

void Signal::wait_past(uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value() != old) return;
    FORERUN_PAUSE();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  changed_.wait(lock, [&] { return value_.load() != old; });
  sleepers_.fetch_sub(1);
}

Pool::Pool(int num_threads) : size_(num_threads < 1 ? 1 : num_threads) { start(); }

void Pool::start() {
  team_.reset(new Team);
  team_->process = this_process();
  for (int thread = 1; thread < size_; ++thread) team_->threads.emplace_back([this, thread] { loop(thread); });
}

Pool::~Pool() {
  if (team_->process != this_process()) {
    (void)team_.release();                // to join its threads, or to end what they sleep on, would take for ever
    return;
  }
  team_->closing.store(true);
  team_->started.raise();
  for (auto& thread : team_->threads) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (team_->process != this_process()) {
    (void)team_.release();
    start();
  }
  std::lock_guard<std::mutex> lock(team_->turn);
  team_->work = &work;
  if (size_ > 1) team_->started.raise();
  work(0);
  barrier();                              // all are done
}

Pool& shared_pool(int num_threads) {
  static std::mutex mutex;
  static auto* pools = new std::map<int, std::unique_ptr<Pool>>;   // threads outlive what the end of a process destroys
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Pool>& pool = (*pools)[num_threads];
  if (!pool) pool.reset(new Pool(num_threads));
  return *pool;
}

void Pool::loop(int thread) {
  for (uint32_t seen = 0;; ++seen) {
    team_->started.wait_past(seen, kSpinsBetweenPasses);
    if (team_->closing.load()) return;
    (*team_->work)(thread);
    barrier();
  }
}

void Pool::barrier() {
  if (size_ == 1) return;
  Team& team = *team_;
  const uint32_t now = team.passed.value();
  if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    team.arrived.store(0, std::memory_order_relaxed);
    team.passed.raise();
    return;
  }
  team.passed.wait_past(now, kSpinsInPass);
}

}  // namespace forerun
