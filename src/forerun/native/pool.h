// A team of threads that runs one function together, with barriers inside. Who waits spins briefly, then sleeps: then
// the system can move a thread whose core a busy neighbour has taken to the core of one that only waits for it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

// A number that threads wait for to change.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void raise();
  void wait_past(uint32_t old, int spins);   // returns once value() != old

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs work(thread) on all threads, the caller being thread 0; returns when all are done. Who comes while the team
  // works for another waits for its turn.
  void run(const std::function<void(int)>& work);
  // Inside `work`: waits until all threads have come here.
  void barrier();

 private:
  struct Team {                  // the threads, and what they share
    long process;                // a forked child has none of the threads
    std::atomic<int> arrived{0};
    std::atomic<bool> closing{false};
    Signal started, passed;
    const std::function<void(int)>* work = nullptr;
    std::mutex turn;
    std::vector<std::thread> threads;
  };
  void start();
  void loop(int thread);

  const int size_;
  std::unique_ptr<Team> team_;
};

// The one team of that size in this process, never ended: models that work in turns don't spin against each other.
Pool& shared_pool(int num_threads);

}  // namespace forerun
