// Attention over int8 keys and values, in integers as far as they go.
//
// Scores are integer products of int8 queries and keys. A key's weight, e^(score - peak) times the scale of its value,
// becomes a whole number up to kTopWeight (a share of the largest scale that the query sees in the tile), so that the
// weighted sum of values is an integer too. What is left in float is elementwise but for the sum of the
// weights, which has one order: every instruction set gives the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_int8_products.h"
#include "vectors.h"

namespace paceline {
namespace {

constexpr int kTopWeight = 255;  // one byte: two of them (15 bits) cost a twentieth of a long step and gave 0.03 % of perplexity

// 2^x for x <= 0 to 1e-4, a tenth of what rounding a score's query and key to int8 does to it; 0 from -127 down.
inline V power_of_two(V x) {
    const V y = max(x, V::set(-127.0f));
    const V shifted = y + V::set(kMagic), r = y - (shifted - V::set(kMagic));
    V p = fma(V::set(5.50089329e-2f), r, V::set(2.42210969e-1f));
    p = fma(p, r, V::set(6.93282902e-1f));
    p = fma(p, r, V::set(1.0f));
    return times_power(p, shifted);
}

// Value scales as shares of the largest one in [low, high), times kTopWeight. A share of 1 stands for `unit`.
struct Shares {
    int low = -1, high = -1;
    float unit = 0.0f;
    float share[kTile];

    void of(const Int8Tile& view, int from, int to) {
        if (from == low && to == high) return;
        low = from;
        high = to;
        float largest = 0.0f;
        int token = from;
        if (to - from >= V::width) {
            V most = V::set(0);
            for (; token + V::width <= to; token += V::width) most = max(most, V::load(view.value_scale + token));
            largest = most.max_lane();
        }
        for (; token < to; token++) largest = std::max(largest, view.value_scale[token]);
        const float inverse = largest > kTiny ? float(kTopWeight) / largest : 0.0f;
        unit = largest > kTiny ? largest / float(kTopWeight) : 0.0f;
        const V by = V::set(inverse), most = V::set(float(kTopWeight));
        for (token = view.begin; token < view.end; token += V::width)
            min(V::load(view.value_scale + token) * by, most).store(share + token);
    }
};

// Scores in w, of which [low, high) count, to rounded weights in its low bits.
__attribute__((noinline)) void int8_softmax(float* w, const Int8Tile& view, const Shares& shares, int low, int high, float query_scale,
                         float* peak, float* mass) {
    constexpr int W = V::width, N = 8 / W;
    for (int key = view.begin; key < low; key++) w[key] = -INFINITY;
    for (int key = std::max(high, view.begin); key < view.end; key++) w[key] = -INFINITY;
    V tops[N], total[N];
    for (int j = 0; j < N; j++) tops[j] = V::set(-INFINITY), total[j] = V::set(0);
    for (int key = view.begin; key < view.end; key += 8)
        for (int j = 0; j < N; j++) tops[j] = max(tops[j], V::load(w + key + j * W));
    for (int j = 1; j < N; j++) tops[0] = max(tops[0], tops[j]);
    const float top = tops[0].max_lane();
    const V shift = V::set(top), scale = V::set(query_scale * 1.44269504f), rounding = V::set(kMagic);
    for (int key = view.begin; key < view.end; key += 8)
        for (int j = 0; j < N; j++) {
            float* at = w + key + j * W;
            const V p = power_of_two((V::load(at) - shift) * scale);
            total[j] = total[j] + p;
            (p * V::load(shares.share + key + j * W) + rounding).store(at);
        }
    float sums[8];
    for (int j = 0; j < N; j++) total[j].store(sums + j * W);
    *peak = top * query_scale;
    *mass = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

template <int NQ, int D, class Source>
void attend_int8_queries(const float* const* q, const int* low, const int* high, const Source& values,
                         const Int8Tile& view, Shares& shares, int d, float* const* out, float* peak, float* mass) {
    alignas(64) float w[NQ * kTile];
    const int8_t* query[NQ];
    float unit[NQ];
    for (int a = 0; a < NQ; a++) query[a] = reinterpret_cast<const int8_t*>(q[a]);
    int8_scores<NQ, D>(query, view, d, w);
    for (int a = 0; a < NQ; a++) {
        if (low[a] >= high[a]) {
            peak[a] = -INFINITY;
            mass[a] = unit[a] = 0.0f;
            std::fill(w + a * kTile, w + (a + 1) * kTile, kMagic);  // any number will do
            continue;
        }
        float query_scale;
        std::memcpy(&query_scale, query[a] + d, sizeof query_scale);
        shares.of(view, low[a], high[a]);
        unit[a] = shares.unit;
        int8_softmax(w + a * kTile, view, shares, low[a], high[a], query_scale, peak + a, mass + a);
    }
    Weights<NQ> weights;
    weights.take(w, view.begin, view.end);
    int8_weigh<NQ>(weights, values, view, d, unit, out);
}

template <class Source>
void attend_int8_from(const float* const* q, int queries, const int* low, const int* high, const Source& values,
                      const Int8Tile& view, int d, float* const* out, float* peak, float* mass) {
    Shares shares;
    const auto attend = [&](auto count, int a) {
        constexpr int NQ = decltype(count)::value;
        if (d == 64)
            attend_int8_queries<NQ, 64>(q + a, low + a, high + a, values, view, shares, d, out + a, peak + a, mass + a);
        else
            attend_int8_queries<NQ, 0>(q + a, low + a, high + a, values, view, shares, d, out + a, peak + a, mass + a);
    };
    int a = 0;
    for (; a + 3 <= queries; a += 3) attend(std::integral_constant<int, 3>(), a);
    if (queries - a == 2) attend(std::integral_constant<int, 2>(), a);
    if (queries - a == 1) attend(std::integral_constant<int, 1>(), a);
}

// Kernels::attend for an int8 cache; q[i] as pack_query leaves it.
void attend_int8(const float* const* q, int queries, const int* low, const int* high, const KeyTile& tile, int d,
                 float* const* out, float* peak, float* mass) {
    int from = kTile, to = 0;
    for (int a = 0; a < queries; a++)
        if (low[a] < high[a]) {
            from = std::min(from, low[a]);
            to = std::max(to, high[a]);
        }
    if (from >= to) {
        for (int a = 0; a < queries; a++) {
            peak[a] = -INFINITY;
            mass[a] = 0.0f;
        }
        return;
    }
    const Int8Tile view(tile, from, to);
#if PACELINE_NEON
    if (queries > 3)
        return attend_int8_from(q, queries, low, high, Interleaved(view, d), view, d, out, peak, mass);
#endif
    attend_int8_from(q, queries, low, high, view, view, d, out, peak, mass);
}

}  // namespace
}  // namespace paceline
