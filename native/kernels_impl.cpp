// Compiled once for each instruction set, with PACELINE_TABLE naming the function that hands the table out.
#include <type_traits>

#include "attention_int8.h"
#include "linear.h"
#include "rounding.h"
#include "vectors.h"

namespace paceline {
namespace {

constexpr int W = V::width;

void rms_norm(const float* x, const float* weight, float eps, int cols, float* out) {
    V squares[4] = {V::set(0), V::set(0), V::set(0), V::set(0)};
    int i = 0;
    for (; i + 4 * W <= cols; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            const V v = V::load(x + i + j * W);
            squares[j] = fma(v, v, squares[j]);
        }
    for (; i < cols; i += W) {
        const V v = V::load(x + i);
        squares[0] = fma(v, v, squares[0]);
    }
    const float mean = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum() / float(cols);
    const V scale = V::set(1.0f / std::sqrt(mean + eps));
    for (i = 0; i < cols; i += W) (V::load(x + i) * scale * V::load(weight + i)).store(out + i);
}

void silu_mul(const float* gate, const float* up, int count, float* out) {
    const V one = V::set(1.0f);
    for (int i = 0; i < count; i += W) {
        const V g = V::load(gate + i);
        (g / (one + exp(V::set(0) - g)) * V::load(up + i)).store(out + i);
    }
}

void rotate(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i += W) {
        const V a = V::load(x + i), b = V::load(x + half + i), c = V::load(cos + i), s = V::load(sin + i);
        (a * c - b * s).store(x + i);
        (b * c + a * s).store(x + half + i);
    }
}

// ---------------------------------------------------------------- attention over float caches

template <Cache kind> inline V load_cache(const void* base, int i) {
    if constexpr (kind == Cache::kF32) return V::load(static_cast<const float*>(base) + i);
    else return V::load_half(static_cast<const uint16_t*>(base) + i);
}

// Scores of NQ queries against NK keys. Each (query, key) has one accumulator and one order of additions, so the
// shape of the tile cannot show in a score.
template <Cache kind, int NQ, int NK>
inline void scores(const float* const* q, const KeyTile& tile, int key, int d, float* out) {
    V sum[NQ][NK];
    const void* keys[NK];
    const float* queries[NQ];
    for (int b = 0; b < NK; b++) keys[b] = tile.key[key + b];
    for (int a = 0; a < NQ; a++) queries[a] = q[a];
    for (int a = 0; a < NQ; a++)
        for (int b = 0; b < NK; b++) sum[a][b] = V::set(0);
    for (int i = 0; i < d; i += W) {
        V qs[NQ];
        for (int a = 0; a < NQ; a++) qs[a] = V::load(queries[a] + i);
        for (int b = 0; b < NK; b++) {
            const V k = load_cache<kind>(keys[b], i);
            for (int a = 0; a < NQ; a++) sum[a][b] = fma(qs[a], k, sum[a][b]);
        }
    }
    for (int a = 0; a < NQ; a++) {
        float* to = out + a * kTile + key;
        if constexpr (NK == 4) store_sums(sum[a][0], sum[a][1], sum[a][2], sum[a][3], to);
        else to[0] = sum[a][0].sum();
    }
}

// The lines of the token a tile further on: memory brings them while this tile is worked on.
inline void ask_ahead(const void* token, int64_t ahead, int bytes) {
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(static_cast<const uint8_t*>(token) + ahead + line);
}

template <Cache kind, int NQ> void all_scores(const float* const* q, const KeyTile& tile, const int64_t* ahead, int from,
                                              int to, int d, float* out) {
    int key = from;
    for (; key + 4 <= to; key += 4) {
        for (int b = 0; ahead != nullptr && b < 4; b++) ask_ahead(tile.key[key + b], ahead[key / 4], d * int(cache_bytes(kind)));
        scores<kind, NQ, 4>(q, tile, key, d, out);
    }
    for (; key < to; key++) scores<kind, NQ, 1>(q, tile, key, d, out);
}

template <int lane> using Lane = std::integral_constant<int, lane>;

// sum of p * v over the keys, for NQ queries and NV vectors of the head from feature i on.
template <Cache kind, int NQ, int NV>
inline void weigh(const float* p, const KeyTile& tile, const int64_t* ahead, int from, int to, int i, float* const* out) {
    V sum[NQ][NV];
    for (int a = 0; a < NQ; a++)
        for (int j = 0; j < NV; j++) sum[a][j] = V::set(0);
    const auto add = [&](int key, auto lane, const float* weights) {
        V v[NV];
        for (int j = 0; j < NV; j++) v[j] = load_cache<kind>(tile.value[key], i + j * W);
        for (int a = 0; a < NQ; a++)
            for (int j = 0; j < NV; j++) sum[a][j] = fma_lane<decltype(lane)::value>(v[j], weights + a * kTile, sum[a][j]);
    };
    int key = from;
    const int bytes = NV * W * int(cache_bytes(kind));
    const int64_t first = i * int64_t(cache_bytes(kind));
    for (; key + 4 <= to; key += 4) {
        for (int b = 0; ahead != nullptr && b < 4; b++) ask_ahead(tile.value[key + b], ahead[key / 4] + first, bytes);
        add(key, Lane<0>(), p + key);
        add(key + 1, Lane<1>(), p + key);
        add(key + 2, Lane<2>(), p + key);
        add(key + 3, Lane<3>(), p + key);
    }
    for (; key < to; key++) add(key, Lane<0>(), p + key);  // p has room for four more
    for (int a = 0; a < NQ; a++)
        for (int j = 0; j < NV; j++) sum[a][j].store(out[a] + i + j * W);
}

template <Cache kind, int NQ>
void attend_queries(const float* const* q, const int* low, const int* high, const KeyTile& tile, const int64_t* ahead,
                    int d, float* const* out, float* peak, float* mass) {
    alignas(64) float p[NQ * kTile + 4];
    int from = kTile, to = 0;
    for (int a = 0; a < NQ; a++) {
        if (low[a] < from) from = low[a];
        if (high[a] > to) to = high[a];
    }
    if (from >= to) from = to = 0;
    const int begin = from / W * W, end = (to + W - 1) / W * W;
    all_scores<kind, NQ>(q, tile, ahead, from, to, d, p);
    for (int a = 0; a < NQ; a++) {
        // Whole vectors around what any of the queries sees; what this one does not see weighs exactly nothing.
        float* row = p + a * kTile;
        for (int key = begin; key < low[a]; key++) row[key] = -INFINITY;
        for (int key = high[a] < begin ? begin : high[a]; key < end; key++) row[key] = -INFINITY;
        V top = V::set(-INFINITY);
        for (int key = begin; key < end; key += W) top = max(top, V::load(row + key));
        peak[a] = top.max_lane();
        const V shift = V::set(peak[a] == -INFINITY ? 0.0f : peak[a]);
        V total = V::set(0);
        for (int key = begin; key < end; key += W) {
            const V e = exp(V::load(row + key) - shift);
            e.store(row + key);
            total = total + e;
        }
        mass[a] = total.sum();
    }
    int i = 0;
    for (; i + 4 * W <= d; i += 4 * W) weigh<kind, NQ, 4>(p, tile, ahead, from, to, i, out);
    for (; i < d; i += W) weigh<kind, NQ, 1>(p, tile, ahead, from, to, i, out);
}

template <Cache kind>
void attend_kind(const float* const* q, int queries, const int* low, const int* high, const KeyTile& tile, int d,
                 float* const* out, float* peak, float* mass) {
    int a = 0;
    for (; a + 4 <= queries; a += 4)
        attend_queries<kind, 4>(q + a, low + a, high + a, tile, a == 0 ? tile.ahead : nullptr, d, out + a, peak + a, mass + a);
    switch (queries - a) {
        case 3: attend_queries<kind, 3>(q + a, low + a, high + a, tile, a == 0 ? tile.ahead : nullptr, d, out + a, peak + a, mass + a); break;
        case 2: attend_queries<kind, 2>(q + a, low + a, high + a, tile, a == 0 ? tile.ahead : nullptr, d, out + a, peak + a, mass + a); break;
        case 1: attend_queries<kind, 1>(q + a, low + a, high + a, tile, a == 0 ? tile.ahead : nullptr, d, out + a, peak + a, mass + a); break;
        default: break;
    }
}

void attend(const float* const* q, int queries, const int* low, const int* high, const KeyTile& tile, Cache cache,
            int d, float* const* out, float* peak, float* mass) {
    if (cache == Cache::kF32) attend_kind<Cache::kF32>(q, queries, low, high, tile, d, out, peak, mass);
    else if (cache == Cache::kF16) attend_kind<Cache::kF16>(q, queries, low, high, tile, d, out, peak, mass);
    else attend_int8(q, queries, low, high, tile, d, out, peak, mass);
}

void combine(float* out, float* peak, float* mass, const float* more, float more_peak, float more_mass, int d) {
    if (more_peak == -INFINITY) return;
    if (*peak == -INFINITY) {
        std::memcpy(out, more, sizeof(float) * d);
        *peak = more_peak;
        *mass = more_mass;
        return;
    }
    const float top = *peak > more_peak ? *peak : more_peak;
    const float old = *peak == top ? 1.0f : exp(*peak - top), fresh = more_peak == top ? 1.0f : exp(more_peak - top);
    const V a = V::set(old), b = V::set(fresh);
    for (int i = 0; i < d; i += W) fma(V::load(more + i), b, V::load(out + i) * a).store(out + i);
    *mass = std::fmaf(more_mass, fresh, *mass * old);
    *peak = top;
}

void divide(const float* x, float mass, int d, float* out) {
    const V by = V::set(mass);
    for (int i = 0; i < d; i += W) (V::load(x + i) / by).store(out + i);
}

float store(float* x, int d, Cache cache, bool key, void* target) {
    if (cache == Cache::kF32) {
        std::memcpy(target, x, sizeof(float) * d);
        return 1.0f;
    }
    if (cache == Cache::kF16) {
        for (int i = 0; i < d; i += W) V::load(x + i).store_half(static_cast<uint16_t*>(target) + i);
        return 1.0f;
    }
    return key ? pack_key(x, d, static_cast<int8_t*>(target)) : pack_value(x, d, static_cast<uint8_t*>(target));
}

#define PACELINE_TEXT(x) #x
#define PACELINE_NAME(x) PACELINE_TEXT(x)

const Kernels table = {PACELINE_NAME(PACELINE_ISA), quantise, round_block, rms_norm, silu_mul, rotate, gemm, pack_query,
                       attend, combine, divide, store};

}  // namespace

const Kernels* PACELINE_TABLE() { return &table; }

}  // namespace paceline
