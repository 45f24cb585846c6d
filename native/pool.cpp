#include "pool.h"

#include <unistd.h>

#include <map>
#include <utility>

namespace paceline {

Pool::Pool(int threads) : team_(threads < 1 ? 1 : threads) {
    for (int id = 1; id < team_.size(); id++) workers_.emplace_back([this, id] { work(id); });
}

Pool::~Pool() {
    stop_.store(true);
    begun_.raise();
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

void Pool::work(int id) {
    uint32_t seen = 0;
    for (;;) {
        seen = begun_.wait(seen);
        if (stop_.load(std::memory_order_acquire)) return;
        call_(data_, id);
        if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.raise();
    }
}

}  // namespace paceline
