#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace paceline {

namespace {
constexpr int kQueries = 32;  // queries of an attention tile, at most
}

Decoder::Decoder(const Shape& shape, std::vector<Layer> layers, std::vector<float> cos, std::vector<float> sin,
                 Cache cache, const Kernels* kernels, int threads)
    : shape_(shape), layers_(std::move(layers)), cos_(std::move(cos)), sin_(std::move(sin)), cache_(cache),
      kernels_(kernels), pool_(threads) {
    if (shape_.head_dim < 16 || shape_.head_dim % 16) throw std::invalid_argument("head_dim must be a multiple of 16");
    if (shape_.kv_heads < 1 || shape_.heads % shape_.kv_heads)
        throw std::invalid_argument("heads must be a multiple of kv_heads");
    if (shape_.heads / shape_.kv_heads > 16)
        throw std::invalid_argument("more than 16 query heads share a key head");
    if (shape_.hidden % kBlock || shape_.intermediate % kBlock || shape_.heads * shape_.head_dim % kBlock)
        throw std::invalid_argument("hidden, intermediate and attention widths must be multiples of 32");
    positions_ = int64_t(cos_.size()) / (shape_.head_dim / 2);
}

void Decoder::reserve(int rows) {
    // Whole tiles: the size of one buffer then tells that all of them suffice.
    const size_t n = size_t((rows + kTileRows - 1) / kTileRows * kTileRows), d = size_t(shape_.head_dim);
    const size_t wide = size_t(std::max({shape_.hidden, shape_.intermediate, shape_.heads * shape_.head_dim}));
    const size_t bytes = Quantised::bytes(rows, int(wide / kBlock));
    if (tiles_of_int8_.size() >= bytes) return;
    normed_.resize(n * wide);
    qkv_.resize(n * d * size_t(shape_.heads + 2 * shape_.kv_heads));
    attended_.resize(n * d * size_t(shape_.heads));
    gate_up_.resize(n * 2 * size_t(shape_.intermediate));
    tiles_of_int8_.resize(bytes);
}

// ---------------------------------------------------------------- who sees what

void Decoder::plan(const StepView& step) {
    const int fitting = std::max(1, kQueries / (shape_.heads / shape_.kv_heads));
    const int tile_rows = fitting < 4 ? fitting : fitting / 4 * 4;  // the kernel takes queries by fours
    tiles_.clear();
    starts_.assign(step.starts, step.starts + step.groups);
    seen_.assign(step.positions, step.positions + step.rows);
    group_row_.assign(step.offsets, step.offsets + step.groups);
    plans_.resize(step.caches.size());
    for (size_t c = 0; c < plans_.size(); c++) {
        plans_[c].window = step.caches[c].window;
        plans_[c].slots = step.caches[c].slots;
        plans_[c].keys.clear();
        plans_[c].first.clear();
        plans_[c].own.assign(size_t(step.rows), {});
    }
    most_key_tiles_ = 1;
    for (int g = 0; g < step.groups; g++) {
        const int begin = int(step.offsets[g]), end = int(step.offsets[g + 1]);
        const int64_t count = step.starts[g] + end - begin;
        bool chain = true;
        for (int r = begin; step.parents != nullptr && r < end; r++)
            chain = chain && step.parents[r] == r - begin - 1;
        for (int r = begin; r < end; r += chain ? tile_rows : 1)
            tiles_.push_back({g, r, chain ? std::min(tile_rows, end - r) : 1});
        most_key_tiles_ = std::max(most_key_tiles_, (count + kTile - 1) / kTile);
        for (size_t c = 0; c < plans_.size(); c++) {
            Plan& plan = plans_[c];
            const int64_t* table = step.caches[c].tables + size_t(g) * size_t(step.caches[c].width);
            plan.first.push_back(int64_t(plan.keys.size()));
            for (int64_t p = 0; p < count; p++)
                plan.keys.push_back(table[p / step.block_size] * step.block_size + p % step.block_size);
            for (int r = begin; !chain && r < end; r++) {
                std::vector<int64_t>& own = plan.own[size_t(r)];
                for (int64_t at = r - begin; at >= 0; at = step.parents[begin + at])
                    own.push_back(plan.slots[begin + at]);
                std::reverse(own.begin(), own.end());
            }
        }
    }
    split_keys_ = int64_t(tiles_.size()) * shape_.kv_heads < 4 * pool_.size();
}

int64_t Decoder::first_key_tile(const Plan& plan, const Tile& tile) const {
    if (plan.window == 0) return 0;
    return std::max<int64_t>(0, seen_[size_t(tile.row)] - plan.window + 1) / kTile;
}

int64_t Decoder::last_key_tile(const Tile& tile) const { return seen_[size_t(tile.row + tile.rows - 1)] / kTile; }

// ---------------------------------------------------------------- attention

void Decoder::attend_tile(const Layer& layer, const Plan& plan, const Tile& tile, int head, int64_t key_tile,
                          float* out, float* peak, float* mass) const {
    const int d = shape_.head_dim, share = shape_.heads / shape_.kv_heads, queries = tile.rows * share;
    const int64_t from = key_tile * kTile, start = starts_[size_t(tile.group)];
    const int64_t* keys = plan.keys.data() + plan.first[size_t(tile.group)];
    const std::vector<int64_t>& own = plan.own[size_t(tile.row)];
    KeyTile view;
    view.count = int(std::min<int64_t>(kTile, seen_[size_t(tile.row + tile.rows - 1)] + 1 - from));
    const size_t width = size_t(d) * cache_bytes(cache_), stride = width * size_t(shape_.kv_heads);
    for (int i = 0; i < view.count; i++) {
        const int64_t p = from + i;
        const size_t slot = size_t(own.empty() || p < start ? keys[p] : own[size_t(p - start)]);
        view.key[i] = static_cast<const uint8_t*>(layer.keys) + slot * stride + width * size_t(head);
        view.value[i] = static_cast<const uint8_t*>(layer.values) + slot * stride + width * size_t(head);
        if (cache_ == Cache::kI8) {
            view.key_scale[i] = layer.key_scales[slot * size_t(shape_.kv_heads) + size_t(head)];
            view.value_scale[i] = layer.value_scales[slot * size_t(shape_.kv_heads) + size_t(head)];
        }
    }
    // The weights of a layer have pushed the cache out of the core's reach, and the tokens of a head lie apart: ask for
    // for the next tile while this one is worked on.
    for (int64_t p = from + kTile; p < std::min<int64_t>(from + 2 * kTile, start); p++) {
        const size_t at = size_t(keys[p]) * stride + width * size_t(head);
        for (size_t line = 0; line < width; line += 64) {
            __builtin_prefetch(static_cast<const uint8_t*>(layer.keys) + at + line);
            __builtin_prefetch(static_cast<const uint8_t*>(layer.values) + at + line);
        }
    }
    const float* q[kQueries];
    float* target[kQueries];
    int low[kQueries], high[kQueries];
    const size_t row_width = size_t(shape_.heads + 2 * shape_.kv_heads) * size_t(d);
    for (int r = 0; r < tile.rows; r++) {
        const int64_t seen = seen_[size_t(tile.row + r)];
        const int64_t oldest = plan.window ? std::max<int64_t>(0, seen - plan.window + 1) : 0;
        for (int i = 0; i < share; i++) {
            const int a = r * share + i;
            q[a] = qkv_.data() + size_t(tile.row + r) * row_width + size_t(head * share + i) * size_t(d);
            target[a] = out + size_t(a) * size_t(d);
            low[a] = int(std::clamp<int64_t>(oldest - from, 0, kTile));
            high[a] = int(std::clamp<int64_t>(seen + 1 - from, 0, view.count));
        }
    }
    kernels_->attend(q, queries, low, high, view, cache_, d, target, peak, mass);
}

void Decoder::finish(const Tile& tile, int head, const float* out, const float* mass) {
    const int d = shape_.head_dim, share = shape_.heads / shape_.kv_heads;
    for (int a = 0; a < tile.rows * share; a++) {
        const size_t row = size_t(tile.row + a / share), h = size_t(head * share + a % share);
        kernels_->divide(out + size_t(a) * size_t(d), mass[a], d,
                         attended_.data() + (row * size_t(shape_.heads) + h) * size_t(d));
    }
}

void Decoder::attention(int id, const Layer& layer, const Plan& plan, std::atomic<int>* tasks,
                        std::atomic<int>* merges) {
    const int d = shape_.head_dim, heads = shape_.kv_heads;
    const int jobs = int(tiles_.size()) * heads;
    alignas(64) float sum[kQueries * 256], more[kQueries * 256];
    float peak[kQueries], mass[kQueries], more_peak[kQueries], more_mass[kQueries];
    const size_t size = size_t(kQueries) * size_t(d);
    if (split_keys_) {
        // Every (tile, head, key tile) by itself, then the same sums in the same order as below. Heads of a key lie side
        // by side: over long contexts one thread takes them all, so that memory is read in order.
        const int64_t key_tiles = most_key_tiles_;
        const int together = key_tiles >= 4 * pool_.size() ? heads : 1;
        const int64_t all = int64_t(jobs) * key_tiles / together;
        int64_t job = 0, end = all;
        if (together == heads) Team::share(all, id, pool_.size(), &job, &end);
        else job = tasks->fetch_add(1, std::memory_order_relaxed);
        for (; job < end; job = together == heads ? job + 1 : tasks->fetch_add(1, std::memory_order_relaxed)) {
            const int64_t key_tile = job / (heads / together) % key_tiles;
            const int64_t index = job / (heads / together) / key_tiles;
            const Tile& tile = tiles_[size_t(index)];
            if (key_tile < first_key_tile(plan, tile) || key_tile > last_key_tile(tile)) continue;
            for (int h = 0; h < together; h++) {
                const int head = together == heads ? h : int(job % heads);
                const size_t at = (size_t(index) * size_t(heads) + size_t(head)) * size_t(key_tiles) + size_t(key_tile);
                attend_tile(layer, plan, tile, head, key_tile, partial_.data() + at * size,
                            peaks_.data() + at * kQueries, masses_.data() + at * kQueries);
            }
        }
        pool_.team().barrier();
    }
    std::atomic<int>* counter = split_keys_ ? merges : tasks;
    for (int job; (job = counter->fetch_add(1, std::memory_order_relaxed)) < jobs;) {
        const Tile& tile = tiles_[size_t(job / heads)];
        const int head = job % heads, queries = tile.rows * (shape_.heads / heads);
        for (int a = 0; a < queries; a++) peak[a] = -INFINITY;
        const int64_t last = last_key_tile(tile);
        for (int64_t key_tile = first_key_tile(plan, tile); key_tile <= last; key_tile++) {
            const float *from = more, *its_peak = more_peak, *its_mass = more_mass;
            if (split_keys_) {
                const size_t at = size_t(job) * size_t(most_key_tiles_) + size_t(key_tile);
                from = partial_.data() + at * size;
                its_peak = peaks_.data() + at * kQueries;
                its_mass = masses_.data() + at * kQueries;
            } else {
                attend_tile(layer, plan, tile, head, key_tile, more, more_peak, more_mass);
            }
            for (int a = 0; a < queries; a++)
                kernels_->combine(sum + a * d, peak + a, mass + a, from + a * d, its_peak[a], its_mass[a], d);
        }
        finish(tile, head, sum, mass);
    }
}

// ---------------------------------------------------------------- the layers

void Decoder::norm_and_quantise(int id, const float* x, const float* weight, int rows) {
    const int cols = shape_.hidden;
    int64_t begin, end;
    Team::share(rows, id, pool_.size(), &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        float* out = normed_.data() + r * cols;
        kernels_->rms_norm(x + r * cols, weight, shape_.eps, cols, out);
        kernels_->quantise(out, cols / kBlock, quantised(cols), int(r), 0);
    }
}

void Decoder::gemm(int id, const Matrix& matrix, int rows, float* y, int64_t ldy, bool add) {
    int64_t begin, end;
    Team::share(matrix.view().groups(), id, pool_.size(), &begin, &end);
    kernels_->gemm(matrix.view(), quantised(matrix.view().cols), rows, int(begin), int(end), y, int(ldy), add);
}

// Bias, head norms, rotary positions, the query's scale, and the rows' keys and values into the cache.
void Decoder::split_heads(int id, const StepView& step, const Layer& layer, const Plan& plan) {
    const int d = shape_.head_dim, half = d / 2, heads = shape_.heads, kv = shape_.kv_heads;
    const float scale = 1.0f / std::sqrt(float(d));
    const size_t width = size_t(heads + 2 * kv) * size_t(d);
    const size_t entry = size_t(d) * cache_bytes(cache_);
    const int64_t jobs = int64_t(step.rows) * (heads + 2 * kv);
    int64_t begin, end;
    Team::share(jobs, id, pool_.size(), &begin, &end);
    for (int64_t job = begin; job < end; job++) {
        const int64_t row = job / (heads + 2 * kv);
        const int h = int(job % (heads + 2 * kv));
        float* x = qkv_.data() + size_t(row) * width + size_t(h) * size_t(d);
        if (!layer.qkv_bias.empty())
            for (int i = 0; i < d; i++) x[i] += layer.qkv_bias[size_t(h) * size_t(d) + size_t(i)];
        if (h < heads + kv) {
            const std::vector<float>& norm = h < heads ? layer.q_norm : layer.k_norm;
            if (!norm.empty()) kernels_->rms_norm(x, norm.data(), shape_.eps, d, x);
            const int64_t p = step.positions[row];
            kernels_->rotate(x, cos_.data() + p * half, sin_.data() + p * half, half);
        }
        if (h < heads) {
            for (int i = 0; i < d; i++) x[i] *= scale;
            if (cache_ == Cache::kI8) kernels_->pack_query(x, d);
            continue;
        }
        const size_t head = size_t(h < heads + kv ? h - heads : h - heads - kv), slot = size_t(plan.slots[row]);
        void* base = h < heads + kv ? layer.keys : layer.values;
        const float factor = kernels_->store(x, d, cache_, static_cast<uint8_t*>(base) + (slot * size_t(kv) + head) * entry);
        if (cache_ == Cache::kI8) (h < heads + kv ? layer.key_scales : layer.value_scales)[slot * size_t(kv) + head] = factor;
    }
}

void Decoder::run(const StepView& step, int first, int last, float* hidden) {
    const int rows = step.rows, f = shape_.intermediate;
    if (rows == 0) return;
    reserve(rows);
    plan(step);
    if (split_keys_) {
        const size_t jobs = tiles_.size() * size_t(shape_.kv_heads) * size_t(most_key_tiles_);
        if (partial_.size() < jobs * kQueries * size_t(shape_.head_dim)) {
            partial_.resize(jobs * kQueries * size_t(shape_.head_dim));
            peaks_.resize(jobs * kQueries);
            masses_.resize(jobs * kQueries);
        }
    }
    std::vector<std::atomic<int>> counters(size_t(last - first) * 2);
    for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
    pool_.run([&](int id) {
        Team& team = pool_.team();
        for (int l = first; l < last; l++) {
            const Layer& layer = layers_[size_t(l)];
            const Plan& plan = plans_[size_t(layer.cache_group)];
            norm_and_quantise(id, hidden, layer.input_norm.data(), rows);
            team.barrier();
            gemm(id, *layer.qkv, rows, qkv_.data(), layer.qkv->view().rows, false);
            team.barrier();
            split_heads(id, step, layer, plan);
            team.barrier();
            std::atomic<int>* counter = &counters[size_t(l - first) * 2];
            attention(id, layer, plan, counter, counter + 1);
            team.barrier();
            const int width = shape_.heads * shape_.head_dim, blocks = width / kBlock;
            int64_t begin, end;
            Team::share(int64_t(rows) * blocks, id, team.size(), &begin, &end);
            for (int64_t block = begin; block < end; block++)
                kernels_->quantise(attended_.data() + block * kBlock, 1, quantised(width), int(block / blocks),
                                   int(block % blocks));
            team.barrier();
            gemm(id, *layer.out, rows, hidden, layer.out->view().rows, true);
            team.barrier();
            norm_and_quantise(id, hidden, layer.post_norm.data(), rows);
            team.barrier();
            gemm(id, *layer.gate_up, rows, gate_up_.data(), layer.gate_up->view().rows, false);
            team.barrier();
            Team::share(int64_t(rows) * (f / kBlock), id, team.size(), &begin, &end);
            for (int64_t block = begin; block < end; block++) {
                const int64_t r = block / (f / kBlock), c = block % (f / kBlock) * kBlock;
                const float* gate = gate_up_.data() + r * 2 * f + c;
                float* out = normed_.data() + block * kBlock;
                kernels_->silu_mul(gate, gate + f, kBlock, out);
                kernels_->quantise(out, 1, quantised(f), int(r), int(c / kBlock));
            }
            team.barrier();
            gemm(id, *layer.down, rows, hidden, layer.down->view().rows, true);
            team.barrier();
        }
    });
}

void Decoder::head(const Matrix& matrix, const float* norm, const float* hidden, int rows, float* out,
                   int64_t ldout) {
    if (rows == 0) return;
    reserve(rows);
    pool_.run([&](int id) {
        norm_and_quantise(id, hidden, norm, rows);
        pool_.team().barrier();
        gemm(id, matrix, rows, out, ldout, false);
    });
}

}  // namespace paceline
