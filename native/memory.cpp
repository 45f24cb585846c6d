#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define PACELINE_WATCHED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PACELINE_WATCHED 1
#endif
#endif

namespace paceline {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = size_t(2) << 20;  // a large page, on x86 and with Arm's pages of 4 KiB
constexpr size_t kSlab = size_t(32) << 20;
constexpr size_t kSmall = size_t(64) << 10;  // less than this is not worth a large page

size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::shared_ptr<uint8_t> aligned(size_t bytes, size_t unit) {
    auto* data = static_cast<uint8_t*>(std::aligned_alloc(unit, up(bytes, unit)));
    if (!data) throw std::bad_alloc();
    return {data, [](uint8_t* p) { std::free(p); }};
}

// Matrices are smaller than large pages and share them: one after the other they are cut from slabs, which are given back
// with the last of them. Pages that nobody writes to take no memory.
struct Slab {
    std::shared_ptr<uint8_t> data;
    size_t size, used = 0;

    explicit Slab(size_t bytes) : data(aligned(bytes, kPage)), size(up(bytes, kPage)) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
        madvise(data.get(), size, MADV_HUGEPAGE);  // a wish: where it is refused, pages are small
#endif
    }
};

}  // namespace

std::shared_ptr<uint8_t> lasting(size_t bytes) {
    bytes = up(bytes, kLine);
#ifdef PACELINE_WATCHED
    return aligned(bytes, kLine);  // each on its own, so that reading beyond one is seen
#endif
    if (bytes < kSmall) return aligned(bytes, kLine);
    // An allocator's, like malloc's: nothing that anybody computes hangs on it.
    static std::mutex mutex;
    static std::weak_ptr<Slab> last;
    const std::lock_guard<std::mutex> turn(mutex);
    std::shared_ptr<Slab> slab = last.lock();
    if (!slab || slab->size - slab->used < bytes) {
        slab = std::make_shared<Slab>(std::max(bytes, kSlab));
        // What fills a slab of its own leaves the rest of the one before to those that come.
        if (bytes <= kSlab / 2 || last.expired()) last = slab;
    }
    uint8_t* data = slab->data.get() + slab->used;
    slab->used += bytes;
    return {slab, data};
}

}  // namespace paceline
