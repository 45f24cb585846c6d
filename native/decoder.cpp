#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace paceline {

namespace {
constexpr int kFewRows = 2;
}  // namespace

Decoder::Decoder(const Shape& shape, std::vector<Layer> layers, std::vector<float> cos, std::vector<float> sin,
                 Cache cache, const Kernels* kernels, int threads)
    : shape_(shape), layers_(std::move(layers)), cos_(std::move(cos)), sin_(std::move(sin)), cache_(cache),
      kernels_(kernels), shared_(Pool::shared(threads)),
      attention_(shape.heads, shape.kv_heads, shape.head_dim, cache, kernels) {
    if (shape_.hidden % kBlock || shape_.intermediate % kBlock || shape_.heads * shape_.head_dim % kBlock)
        throw std::invalid_argument("hidden, intermediate and attention widths must be multiples of 32");
    positions_ = int64_t(cos_.size()) / (shape_.head_dim / 2);
}

void Decoder::reserve(int rows) {
    // Whole tiles: the size of one buffer then tells that all of them suffice.
    const size_t n = size_t((rows + kTileRows - 1) / kTileRows * kTileRows), d = size_t(shape_.head_dim);
    const int wide = std::max(shape_.hidden, shape_.heads * shape_.head_dim);
    const size_t bytes = Quantised::bytes(rows, wide / kBlock);
    if (int8_.size() >= bytes) return;
    own_int8_.assign(size_t(pool_.size()), std::vector<uint8_t>(Quantised::bytes(kFewRows, wide / kBlock)));
    normed_.resize(std::max(n, size_t(pool_.size())) * size_t(shape_.hidden));
    qkv_.resize(n * d * size_t(shape_.heads + 2 * shape_.kv_heads));
    attended_.resize(n * d * size_t(shape_.heads));
    gate_up_.resize(n * size_t(gate_up_stride()));
    int8_.resize(bytes);
    gated_int8_.resize(Quantised::bytes(rows, shape_.intermediate / kBlock));
}

// int8 values of x [rows, cols], normed if there is a weight, for the product with the matrix. Few rows are rounded by
// every thread for itself, which is faster than waiting for one another; many are shared out.
Quantised Decoder::rounded(int id, const float* x, const float* weight, const Matrix& matrix, int rows) {
    const int cols = matrix.view().cols;
    const bool alone = rows <= kFewRows;
    const Quantised out{alone ? own_int8_[size_t(id)].data() : int8_.data(), cols / kBlock};
    int64_t begin = 0, end = rows;
    if (!alone) Team::share(rows, id, pool_.size(), &begin, &end);
    for (int64_t r = begin; r < end; r++) {
        const float* row = x + r * cols;
        if (weight != nullptr) {
            float* normed = normed_.data() + (alone ? id : r) * cols;
            kernels_->rms_norm(row, weight, shape_.eps, cols, normed);
            row = normed;
        }
        kernels_->quantise(row, cols / kBlock, out, int(r), 0, matrix.view().spread);
    }
    if (!alone) pool_.team().barrier();
    return out;
}

void Decoder::gemm(int id, const Matrix& matrix, const Quantised& x, int rows, float* y, int64_t ldy, bool add) {
    int64_t begin, end;
    Team::share(matrix.view().groups(), id, pool_.size(), &begin, &end);
    kernels_->gemm(matrix.view(), x, rows, int(begin), int(end), y, int(ldy), add);
}

// silu(gate) * up in int8. A thread takes the same columns of both halves, so that it waits for nobody in between.
void Decoder::gate_and_up(int id, const Layer& layer, const Quantised& x, int rows) {
    const Matrix& matrix = *layer.gate_up;
    const bool spreads = layer.down->view().spread;
    const int f = shape_.intermediate, blocks = f / kBlock, groups = kBlock / kLanes;
    int64_t begin, end;
    Team::share(blocks, id, pool_.size(), &begin, &end);
    for (const int half : {0, f / kLanes})
        kernels_->gemm(matrix.view(), x, rows, half + int(begin) * groups, half + int(end) * groups,
                       gate_up_.data(), gate_up_stride(), false);
    alignas(64) float product[kBlock];
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t block = begin; block < end; block++) {
            const float* gate = gate_up_.data() + r * gate_up_stride() + block * kBlock;
            kernels_->silu_mul(gate, gate + f, kBlock, product);
            kernels_->quantise(product, 1, gated(), int(r), int(block), spreads);
        }
    }
}

// Bias, head norms, rotary positions, the query's scale, and the rows' keys and values into the cache.
void Decoder::split_heads(int id, const StepView& step, const Layer& layer) {
    const int d = shape_.head_dim, half = d / 2, heads = shape_.heads, kv = shape_.kv_heads;
    const float scale = 1.0f / std::sqrt(float(d));
    const size_t width = size_t(heads + 2 * kv) * size_t(d);
    const int64_t jobs = int64_t(step.rows) * (heads + 2 * kv);
    const int64_t* slots = step.caches[size_t(layer.cache_group)].slots;
    int64_t begin, end;
    Team::share(jobs, id, pool_.size(), &begin, &end);
    for (int64_t job = begin; job < end; job++) {
        const int64_t row = job / (heads + 2 * kv);
        const int h = int(job % (heads + 2 * kv));
        float* x = qkv_.data() + size_t(row) * width + size_t(h) * size_t(d);
        if (h >= heads) {
            const bool key = h < heads + kv;
            store_head(layer, x, key, key ? h - heads : h - heads - kv, step.positions[row], slots[row]);
            continue;
        }
        if (!layer.qkv_bias.empty())
            for (int i = 0; i < d; i++) x[i] += layer.qkv_bias[size_t(h) * size_t(d) + size_t(i)];
        if (!layer.q_norm.empty()) kernels_->rms_norm(x, layer.q_norm.data(), shape_.eps, d, x);
        const int64_t p = step.positions[row];
        kernels_->rotate(x, cos_.data() + p * half, sin_.data() + p * half, half);
        for (int i = 0; i < d; i++) x[i] *= scale;
        if (cache_ == Cache::kI8) kernels_->pack_query(x, d);
    }
}

void Decoder::store_head(const Layer& layer, float* x, bool key, int head, int64_t position, int64_t slot) {
    const int d = shape_.head_dim, half = d / 2, kv = shape_.kv_heads;
    if (!layer.qkv_bias.empty()) {
        const float* bias = layer.qkv_bias.data() + size_t(shape_.heads + (key ? 0 : kv) + head) * size_t(d);
        for (int i = 0; i < d; i++) x[i] += bias[i];
    }
    if (key) {
        if (!layer.k_norm.empty()) kernels_->rms_norm(x, layer.k_norm.data(), shape_.eps, d, x);
        kernels_->rotate(x, cos_.data() + position * half, sin_.data() + position * half, half);
    }
    const size_t at = size_t(slot) * size_t(kv) + size_t(head), entry = size_t(d) * cache_bytes(cache_);
    void* base = key ? layer.cache.keys : layer.cache.values;
    const float factor = kernels_->store(x, d, cache_, key, static_cast<uint8_t*>(base) + at * entry);
    if (cache_ == Cache::kI8) (key ? layer.cache.key_scales : layer.cache.value_scales)[at] = factor;
}

void Decoder::keep(const Matrix& mix, const Matrix& matrix, const float* norm, const std::vector<const float*>& taps,
                   int rows, const int64_t* positions, const int64_t* slots) {
    if (rows == 0) return;
    reserve(rows);
    const int d = shape_.head_dim, kv = shape_.kv_heads, each = 2 * kv, blocks = shape_.hidden / kBlock;
    const int64_t width = matrix.view().rows, heads = int64_t(layers_.size()) * each, streams = int64_t(taps.size());
    kept_.resize(std::max(kept_.size(), size_t(rows) * size_t(width)));
    mixed_.resize(std::max(mixed_.size(), size_t(rows) * size_t(shape_.hidden)));
    taps_int8_.resize(std::max(taps_int8_.size(), Quantised::bytes(rows, int(streams) * blocks)));
    const Quantised tapped{taps_int8_.data(), int(streams) * blocks};
    pool_.run([&](int id) {
        int64_t first, last;
        Team::share(rows * streams, id, pool_.size(), &first, &last);
        for (int64_t job = first; job < last; job++) {
            const int64_t row = job / streams, stream = job % streams;
            kernels_->quantise(taps[size_t(stream)] + row * shape_.hidden, blocks, tapped, int(row), int(stream) * blocks,
                               mix.view().spread);
        }
        pool_.team().barrier();
        gemm(id, mix, tapped, rows, mixed_.data(), shape_.hidden, false);
        pool_.team().barrier();
        gemm(id, matrix, rounded(id, mixed_.data(), norm, matrix, rows), rows, kept_.data(), width, false);
        pool_.team().barrier();
        int64_t begin, end;
        Team::share(rows * heads, id, pool_.size(), &begin, &end);
        for (int64_t job = begin; job < end; job++) {
            const int64_t row = job / heads;
            const int h = int(job % heads), own = h % each;
            store_head(layers_[size_t(h / each)], kept_.data() + row * width + int64_t(h) * d, own < kv, own % kv,
                       positions[row], slots[row]);
        }
    });
}

// Each thread copies its share: nobody writes the stream before all have passed another barrier.
void Decoder::tap(int id, int layer, int rows, const float* hidden, const std::vector<Tap>& taps) const {
    for (const Tap& one : taps) {
        if (one.layer != layer) continue;
        int64_t begin, end;
        Team::share(int64_t(rows) * shape_.hidden, id, pool_.size(), &begin, &end);
        std::copy(hidden + begin, hidden + end, one.out + begin);
    }
}

void Decoder::run(const StepView& step, int first, int last, float* hidden, const std::vector<Tap>& taps) {
    const int rows = step.rows;
    if (rows == 0) return;
    reserve(rows);
    attention_.plan(step, pool_.size());
    std::vector<PagedAttention::Tasks> tasks(size_t(last - first));
    pool_.run([&](int id) {
        Team& team = pool_.team();
        for (int l = first; l < last; l++) {
            const Layer& layer = layers_[size_t(l)];
            tap(id, l, rows, hidden, taps);
            const Quantised input = rounded(id, hidden, layer.input_norm.data(), *layer.qkv, rows);
            gemm(id, *layer.qkv, input, rows, qkv_.data(), layer.qkv->view().rows, false);
            team.barrier();
            split_heads(id, step, layer);
            team.barrier();
            attention_.attend(team, id, layer.cache, layer.cache_group, qkv_.data(), size_t(layer.qkv->view().rows),
                              attended_.data(), tasks[size_t(l - first)]);
            team.barrier();
            const Quantised mixed = rounded(id, attended_.data(), nullptr, *layer.out, rows);
            gemm(id, *layer.out, mixed, rows, hidden, layer.out->view().rows, true);
            team.barrier();
            const Quantised between = rounded(id, hidden, layer.post_norm.data(), *layer.gate_up, rows);
            gate_and_up(id, layer, between, rows);
            team.barrier();
            gemm(id, *layer.down, gated(), rows, hidden, layer.down->view().rows, true);
            team.barrier();
        }
        tap(id, last, rows, hidden, taps);
    });
}

void Decoder::head(const Matrix& matrix, const float* norm, const float* hidden, int rows, float* out,
                   int64_t ldout) {
    if (rows == 0) return;
    reserve(rows);
    pool_.run([&](int id) {
        gemm(id, matrix, rounded(id, hidden, norm, matrix, rows), rows, out, ldout, false);
    });
}

}  // namespace paceline
