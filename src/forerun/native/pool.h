// A team of threads that runs one function together, with barriers inside. It spins briefly, then sleeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace forerun {

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  // Runs work(thread) on all threads, the caller being thread 0; returns when all are done.
  void run(const std::function<void(int)>& work);
  // Inside `work`: waits until all threads have come here.
  void barrier();

 private:
  struct Team;                           // the threads, and what they sleep on

  void start();
  void loop(int thread);
  template <class Done> void wait(Done done);
  void wake_sleepers();

  const int size_;
  std::atomic<uint32_t> round_{0};       // counts calls of run
  std::atomic<int> running_{0};
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> barrier_{0};     // counts barriers passed
  std::atomic<int> sleepers_{0};         // threads that sleep inside `work`, or wait for its end
  std::atomic<bool> closing_{false};
  const std::function<void(int)>* work_ = nullptr;
  std::unique_ptr<Team> team_;
};

}  // namespace forerun
