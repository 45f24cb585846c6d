#include "pool.h"

#include <unistd.h>

#include <map>
#include <utility>

namespace paceline {

namespace {
// About a millisecond: longer than the host's work between two steps, short enough not to heat a laptop.
constexpr int kSpinsBeforeParking = 2000000;
}  // namespace

Pool::Pool(int threads) : team_(threads < 1 ? 1 : threads) {
    for (int id = 1; id < team_.size(); id++) workers_.emplace_back([this, id] { work(id); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
        generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

std::shared_ptr<Pool> Pool::shared(int threads) {
    static std::mutex mutex;
    static std::map<std::pair<pid_t, int>, std::weak_ptr<Pool>> pools;  // threads do not survive a fork
    std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<Pool>& known = pools[{getpid(), threads}];
    std::shared_ptr<Pool> pool = known.lock();
    if (!pool) known = pool = std::make_shared<Pool>(threads);
    return pool;
}

void Pool::start() {
    pending_.store(team_.size() - 1, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) {
        // Taking the lock makes sure that nobody is between looking at the generation and going to sleep.
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
}

void Pool::wait() {
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; spins++) {
        if (spins < kSpinsBeforeParking) relax(); else std::this_thread::yield();
    }
}

void Pool::work(int id) {
    uint64_t seen = 0;
    for (;;) {
        uint64_t now = seen;
        for (int spins = 0; spins < kSpinsBeforeParking; spins++) {
            now = generation_.load(std::memory_order_acquire);
            if (now != seen) break;
            relax();
        }
        if (now == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            parked_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
            parked_.fetch_sub(1, std::memory_order_seq_cst);
            now = generation_.load(std::memory_order_acquire);
        }
        seen = now;
        if (stop_.load(std::memory_order_acquire)) return;
        call_(data_, id);
        pending_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace paceline
