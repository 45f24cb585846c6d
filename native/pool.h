// A persistent team of threads: workers spin for a moment after each job, then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
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

// A number that threads wait for to change. They spin first, for what they wait for comes within microseconds while
// every thread has a core of its own. Then they sleep, for where others compute too it may be just their core that is
// missing: who has slept is let in again at once, where who has spun or yielded stands behind everybody else. How long
// they spin is learnt: half as long after it was in vain, a little longer after it was not.
class Signal {
  public:
    // Spin for so long at most.
    explicit Signal(std::chrono::nanoseconds most) : step_(most.count() / kSteps), patience_(most.count()) {}

    uint32_t now() const { return value_.load(std::memory_order_acquire); }

    void raise() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
        { std::lock_guard<std::mutex> lock(mutex_); }  // nobody is between looking at the number and going to sleep
        wake_.notify_all();
    }

    // What it is once it is no longer `seen`.
    uint32_t wait(uint32_t seen) {
        const int64_t patience = patience_.load(std::memory_order_relaxed);
        if (spin(seen, std::chrono::nanoseconds(patience))) {
            patience_.store(std::min(patience + step_, kSteps * step_), std::memory_order_relaxed);
            return now();
        }
        patience_.store(std::max(patience / 2, step_), std::memory_order_relaxed);
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        return now();
    }

  private:
    // By the clock, for a `pause` takes from one to over a hundred cycles, by processor.
    bool spin(uint32_t seen, std::chrono::nanoseconds patience) const {
        using clock = std::chrono::steady_clock;
        for (const auto until = clock::now() + patience;;) {
            for (int i = 0; i < kLooks; i++, relax()) {
                if (now() != seen) return true;
            }
            if (clock::now() >= until) return false;
        }
    }

    static constexpr int kLooks = 64;  // between two looks at the clock
    static constexpr int64_t kSteps = 32;
    const int64_t step_;
    std::atomic<int64_t> patience_;
    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

constexpr std::chrono::microseconds kLate{400};  // more than what the others of a team may be late by when each has a core
// Longer than what the host does between two steps, short enough not to heat a laptop.
constexpr std::chrono::microseconds kBetweenJobs{3000};

// What a job sees of its team. All threads of a job must reach the same barriers.
class Team {
  public:
    Team(int size) : size_(size) {}
    int size() const { return size_; }

    void barrier() {
        if (size_ == 1) return;
        const uint32_t round = round_.now();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.raise();
            return;
        }
        round_.wait(round);
    }

    // This thread's share [begin, end) of `count` items, contiguous and fixed by the thread's number alone.
    static void share(int64_t count, int id, int size, int64_t* begin, int64_t* end) {
        *begin = count * id / size;
        *end = count * (id + 1) / size;
    }

  private:
    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    Signal round_{kLate};
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
        pending_.store(team_.size() - 1, std::memory_order_relaxed);
        const uint32_t before = done_.now();
        begun_.raise();
        job(0);
        done_.wait(before);
    }

    Team& team() { return team_; }

    // The pool of that many threads that everybody in this process shares. With one each, for a model and for the
    // head that drafts for it, the idle ones would spin on the cores that the busy one needs.
    static std::shared_ptr<Pool> shared(int threads);

  private:
    void work(int id);

    std::mutex jobs_;

    Team team_;
    void (*call_)(void*, int) = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<int> pending_{0};
    std::atomic<bool> stop_{false};
    Signal begun_{kBetweenJobs}, done_{kLate};
    std::vector<std::thread> workers_;
};

}  // namespace paceline
