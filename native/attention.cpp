#include "attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace paceline {

namespace {
constexpr int kQueries = 32;    // queries of a tile, at most
constexpr int kMostShared = 16; // query heads of a key head, at most
constexpr int kWidest = 256;    // features of a head, at most
constexpr int kTilesEach = 3;   // of the longest, by whose work a thread takes several heads of a tile at once
constexpr int kSpan = 4;        // key tiles that are folded together before anything else
constexpr int kNarrowest = 16;  // features of a head, at least
constexpr int kResults = kQueries * kWidest / kNarrowest;  // of queries that are worked on together, at most
}  // namespace

PagedAttention::PagedAttention(int heads, int kv_heads, int head_dim, Cache cache, const Kernels* kernels)
    : heads_(heads), kv_heads_(kv_heads), head_dim_(head_dim), cache_(cache), kernels_(kernels) {
    if (head_dim < 16 || head_dim % 16 || head_dim > kWidest)
        throw std::invalid_argument("head_dim must be a multiple of 16, at most 256");
    if (kv_heads < 1 || heads < 1 || heads % kv_heads) throw std::invalid_argument("heads must be a multiple of kv_heads");
    if (heads / kv_heads > kMostShared) throw std::invalid_argument("more than 16 query heads share a key head");
}

// ---------------------------------------------------------------- who sees what

void PagedAttention::plan(const StepView& step, int threads) {
    const int fitting = std::max(1, kQueries / (heads_ / kv_heads_));
    const int tile_rows = fitting < 4 ? fitting : fitting / 4 * 4;  // the kernel takes queries by fours
    tiles_.clear();
    starts_.assign(step.starts, step.starts + step.groups);
    seen_.assign(step.positions, step.positions + step.rows);
    plans_.resize(step.caches.size());
    for (size_t c = 0; c < plans_.size(); c++) {
        plans_[c].window = step.caches[c].window;
        plans_[c].oldest = step.caches[c].first;
        plans_[c].keys.clear();
        plans_[c].first.clear();
        plans_[c].own.assign(size_t(step.rows), {});
    }
    most_spans_ = 1;
    for (int g = 0; g < step.groups; g++) {
        const int begin = int(step.offsets[g]), end = int(step.offsets[g + 1]);
        const int64_t count = step.starts[g] + end - begin;
        if (step.mutual) std::fill(seen_.begin() + begin, seen_.begin() + end, count - 1);
        bool chain = true;
        for (int r = begin; step.parents != nullptr && r < end; r++)
            chain = chain && step.parents[r] == r - begin - 1;
        for (int r = begin; r < end; r += chain ? tile_rows : 1)
            tiles_.push_back({g, r, chain ? std::min(tile_rows, end - r) : 1});
        most_spans_ = std::max(most_spans_, (count + kSpan * kTile - 1) / (kSpan * kTile));
        for (size_t c = 0; c < plans_.size(); c++) {
            Plan& plan = plans_[c];
            const int64_t* table = step.caches[c].tables + size_t(g) * size_t(step.caches[c].width);
            plan.first.push_back(int64_t(plan.keys.size()));
            for (int64_t p = 0; p < count; p++)
                plan.keys.push_back(table[p / step.block_size] * step.block_size + p % step.block_size);
            for (int r = begin; !chain && r < end; r++) {
                std::vector<int64_t>& own = plan.own[size_t(r)];
                for (int64_t at = r - begin; at >= 0; at = step.parents[begin + at])
                    own.push_back(step.caches[c].slots[begin + at]);
                std::reverse(own.begin(), own.end());
            }
        }
    }
    split_keys_ = int64_t(tiles_.size()) * kv_heads_ < 4 * threads;
    most_queries_ = 0;
    for (const Tile& tile : tiles_) most_queries_ = std::max(most_queries_, size_t(tile.rows * (heads_ / kv_heads_)));
    // A key's heads lie side by side: who takes several of them reads memory in order. With little work, or most of it in
    // one tile, the other threads would wait for whoever has the last of it.
    int64_t all = 0, longest = 0;
    for (const Tile& tile : tiles_) {
        const int64_t keys = seen_[size_t(tile.row + tile.rows - 1)] + 1;
        all += keys;
        longest = std::max(longest, keys);
    }
    together_ = 1;
    if (!split_keys_ && longest > 0 && all >= kTilesEach * threads * longest)
        together_ = std::clamp(kQueries * kWidest / int(std::max<size_t>(1, most_queries_) * size_t(head_dim_)), 1, kv_heads_);
    if (!split_keys_) return;
    // Side by side, not a largest tile apart: strides of a power of two fight for the same lines of the caches.
    const size_t results = tiles_.size() * size_t(kv_heads_) * size_t(most_spans_) * most_queries_;
    if (masses_.size() >= results) return;
    partial_.resize(results * size_t(head_dim_));
    peaks_.resize(results);
    masses_.resize(results);
}

int64_t PagedAttention::oldest_key(const Plan& plan, int row) const {
    return plan.window == 0 ? plan.oldest : std::max(plan.oldest, seen_[size_t(row)] - plan.window + 1);
}

int64_t PagedAttention::first_key_tile(const Plan& plan, const Tile& tile) const {
    return oldest_key(plan, tile.row) / kTile;
}

int64_t PagedAttention::last_key_tile(const Tile& tile) const {
    return seen_[size_t(tile.row + tile.rows - 1)] / kTile;
}

// ---------------------------------------------------------------- attention

void PagedAttention::attend_tile(const Layer& layer, const Tile& tile, int head, int before, int behind, int64_t key_tile,
                                 float* out, float* peak, float* mass) const {
    const int d = head_dim_, share = heads_ / kv_heads_, queries = tile.rows * share;
    const Plan& plan = layer.plan;
    const Planes& planes = layer.planes;
    const int64_t from = key_tile * kTile, start = starts_[size_t(tile.group)];
    const int64_t* keys = plan.keys.data() + plan.first[size_t(tile.group)];
    const std::vector<int64_t>& own = plan.own[size_t(tile.row)];
    KeyTile view;
    view.count = int(std::min<int64_t>(kTile, seen_[size_t(tile.row + tile.rows - 1)] + 1 - from));
    const size_t width = size_t(d) * cache_bytes(cache_), stride = width * size_t(kv_heads_);
    const uint8_t* first_key = static_cast<const uint8_t*>(planes.keys) + width * size_t(head);
    const uint8_t* first_value = static_cast<const uint8_t*>(planes.values) + width * size_t(head);
    int64_t tree_slots[kTile];
    const int64_t* slots = keys + from;
    if (!own.empty() && from + view.count > start) {
        for (int i = 0; i < view.count; i++)
            tree_slots[i] = from + i < start ? keys[from + i] : own[size_t(from + i - start)];
        slots = tree_slots;
    }
    for (int i = 0; i < view.count; i++) {
        view.key[i] = first_key + size_t(slots[i]) * stride;
        view.value[i] = first_value + size_t(slots[i]) * stride;
    }
    for (int i = 0; cache_ == Cache::kI8 && i < view.count; i++) {
        const size_t at = size_t(slots[i]) * size_t(kv_heads_) + size_t(head);
        view.key_scale[i] = planes.key_scales[at];
        view.value_scale[i] = planes.value_scales[at];
    }
    // The weights of a layer have pushed the cache out of the core's reach, and the tokens of a head lie apart: ask
    // for what comes next while this is worked on, the next head of the tile or the first one of the next tile.
    const int64_t next = from + kTile, after = std::min<int64_t>(next + kTile, start);
    if (behind > 0) std::fill(view.ahead, view.ahead + (view.count + 3) / 4, int64_t(width));
    for (int64_t p = next; behind == 0 && p + 4 <= after; p += 4)
        if (keys[p + 3] - keys[p] == 3 && keys[p + 3 - kTile] - keys[p - kTile] == 3)
            view.ahead[(p - next) / 4] = (keys[p] - keys[p - kTile]) * int64_t(stride) - int64_t(before) * int64_t(width);
    for (int64_t p = next; cache_ == Cache::kI8 && head == 0 && p < after; p += 4) {
        __builtin_prefetch(planes.key_scales + size_t(keys[p]) * size_t(kv_heads_));
        __builtin_prefetch(planes.value_scales + size_t(keys[p]) * size_t(kv_heads_));
    }
    const float* q[kQueries];
    float* target[kQueries];
    int low[kQueries], high[kQueries];
    for (int r = 0; r < tile.rows; r++) {
        const int64_t seen = seen_[size_t(tile.row + r)];
        const int64_t oldest = oldest_key(plan, tile.row + r);
        for (int i = 0; i < share; i++) {
            const int a = r * share + i;
            q[a] = layer.q + size_t(tile.row + r) * layer.stride + size_t(head * share + i) * size_t(d);
            target[a] = out + size_t(a) * size_t(d);
            low[a] = int(std::clamp<int64_t>(oldest - from, 0, kTile));
            high[a] = int(std::clamp<int64_t>(seen + 1 - from, 0, view.count));
        }
    }
    kernels_->attend(q, queries, low, high, view, cache_, d, target, peak, mass);
}

void PagedAttention::finish(const Tile& tile, int head, const float* sum, const float* mass, float* out) const {
    const int d = head_dim_, share = heads_ / kv_heads_;
    for (int a = 0; a < tile.rows * share; a++) {
        const size_t row = size_t(tile.row + a / share), h = size_t(head * share + a % share);
        kernels_->divide(sum + size_t(a) * size_t(d), mass[a], d, out + (row * size_t(heads_) + h) * size_t(d));
    }
}

// For heads [head, head + heads): their vectors of a key lie side by side, so that memory is read in order.
void PagedAttention::attend_span(const Layer& layer, const Tile& tile, int head, int heads, int64_t span,
                                 const Result* results) const {
    const int queries = tile.rows * (heads_ / kv_heads_);
    alignas(64) float more[kQueries * kWidest];
    float peak[kQueries], mass[kQueries];
    for (int h = 0; h < heads; h++) std::fill(results[h].peak, results[h].peak + queries, -INFINITY);
    const int64_t first = std::max(span * kSpan, first_key_tile(layer.plan, tile));
    const int64_t last = std::min(span * kSpan + kSpan - 1, last_key_tile(tile));
    for (int64_t key_tile = first; key_tile <= last; key_tile++)
        for (int h = 0; h < heads; h++) {
            attend_tile(layer, tile, head + h, h, heads - 1 - h, key_tile, more, peak, mass);
            fold({more, peak, mass}, queries, results[h]);
        }
}

void PagedAttention::fold(const Result& more, int queries, const Result& into) const {
    for (int a = 0; a < queries; a++)
        kernels_->combine(into.sum + a * head_dim_, into.peak + a, into.mass + a, more.sum + a * head_dim_, more.peak[a],
                          more.mass[a], head_dim_);
}

PagedAttention::Result PagedAttention::partial(int64_t job, int64_t span) {
    const size_t at = (size_t(job) * size_t(most_spans_) + size_t(span)) * most_queries_;
    return {partial_.data() + at * size_t(head_dim_), peaks_.data() + at, masses_.data() + at};
}

// Every (tile, head, span) by itself; over long contexts one thread takes all heads of a span.
void PagedAttention::attend_spans(Team& team, int id, const Layer& layer, std::atomic<int>& next) {
    const int heads = kv_heads_;
    const int together = most_spans_ >= 2 * team.size() ? heads : 1;
    const int64_t all = int64_t(tiles_.size()) * heads * most_spans_ / together;
    std::vector<Result> results;
    int64_t job = 0, end = all;
    if (together == heads) Team::share(all, id, team.size(), &job, &end);
    else job = next.fetch_add(1, std::memory_order_relaxed);
    for (; job < end; job = together == heads ? job + 1 : next.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t span = job / (heads / together) % most_spans_, index = job / (heads / together) / most_spans_;
        const Tile& tile = tiles_[size_t(index)];
        const int head = together == heads ? 0 : int(job % heads);
        results.clear();
        for (int h = head; h < head + together; h++) results.push_back(partial(index * heads + h, span));
        attend_span(layer, tile, head, together, span, results.data());
    }
}

void PagedAttention::attend(Team& team, int id, const Planes& planes, int cache_group, const float* q, size_t stride,
                            float* out, Tasks& tasks) {
    const int heads = kv_heads_;
    const Layer layer{planes, plans_[size_t(cache_group)], q, stride};
    if (split_keys_) {
        attend_spans(team, id, layer, tasks.attended);
        team.barrier();
    }
    // Whether spans were shared out or not, and however many heads are taken together: the same sums in the same order.
    alignas(64) float sum[kQueries * kWidest], more[kQueries * kWidest];
    float peak[kResults], mass[kResults], more_peak[kResults], more_mass[kResults];
    const int parts = (heads + together_ - 1) / together_, jobs = int(tiles_.size()) * parts;
    std::vector<Result> spans;
    for (int job; (job = tasks.merged.fetch_add(1, std::memory_order_relaxed)) < jobs;) {
        const Tile& tile = tiles_[size_t(job / parts)];
        const int head = job % parts * together_, company = std::min(together_, heads - head);
        const int queries = tile.rows * (heads_ / heads), floats = queries * head_dim_;
        std::fill(peak, peak + company * queries, -INFINITY);
        const int64_t last = last_key_tile(tile) / kSpan;
        for (int64_t span = first_key_tile(layer.plan, tile) / kSpan; span <= last; span++) {
            spans.clear();
            for (int h = 0; h < company; h++)
                spans.push_back(split_keys_ ? partial(job, span)
                                            : Result{more + h * floats, more_peak + h * queries, more_mass + h * queries});
            if (!split_keys_) attend_span(layer, tile, head, company, span, spans.data());
            for (int h = 0; h < company; h++)
                fold(spans[size_t(h)], queries, {sum + h * floats, peak + h * queries, mass + h * queries});
        }
        for (int h = 0; h < company; h++) finish(tile, head + h, sum + h * floats, mass + h * queries, out);
    }
}

}  // namespace paceline
