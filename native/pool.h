// A persistent team of threads: workers spin for a moment after each job, then park.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

inline void relax() {
#if defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#elif defined(__x86_64__)
    asm volatile("pause" ::: "memory");
#endif
}

// What a job sees of its team. All threads of a job must reach the same barriers.
class Team {
  public:
    Team(int size) : size_(size) {}
    int size() const { return size_; }

    void barrier() {
        if (size_ == 1) return;
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            // With fewer cores than threads the one we wait for may need ours.
            if (spins < kSpins) relax(); else std::this_thread::yield();
        }
    }

    // This thread's share [begin, end) of `count` items, contiguous and fixed by the thread's number alone.
    static void share(int64_t count, int id, int size, int64_t* begin, int64_t* end) {
        *begin = count * id / size;
        *end = count * (id + 1) / size;
    }

  private:
    static constexpr int kSpins = 20000;
    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return team_.size(); }

    // Run job(id) on every thread of the team, the caller being number 0, and wait for all. One job at a time: whoever
    // else has one waits, but for a team of one, which is its caller. Not reentrant.
    template <class Job> void run(Job&& job) {
        if (team_.size() == 1) {
            job(0);
            return;
        }
        std::lock_guard<std::mutex> lock(jobs_);
        call_ = [](void* data, int id) { (*static_cast<Job*>(data))(id); };
        data_ = &job;
        start();
        job(0);
        wait();
    }

    Team& team() { return team_; }

    // The pool of that many threads that everybody in this process shares. With one each, for a model and for the
    // head that drafts for it, the idle ones would spin on the cores that the busy one needs.
    static std::shared_ptr<Pool> shared(int threads);

  private:
    void start();
    void wait();
    void work(int id);

    std::mutex jobs_;

    Team team_;
    void (*call_)(void*, int) = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int> pending_{0};
    std::atomic<int> parked_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace paceline
