// Attention over int8 keys and values, in integers as far as they go.
//
// Scores are integer products of int8 queries and keys. A key's weight, e^(score - peak) times the scale of its value,
// becomes a whole number up to kTopWeight, which the largest of the tile is, so that the weighted sum of values is an
// integer too. (With the largest score and the largest scale for one, the first tokens of a text, whose scores are large
// and whose values are small, would leave the others a few levels: half of what the int8 cache lost.) What is left in float is elementwise but for the sum of the
// weights, which has one order: every instruction set gives the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_int8_products.h"
#include "vectors.h"

namespace paceline {
namespace {

constexpr int kTopWeight = 255;  // one byte: two of them (15 bits) cost a twentieth of a long step

// 2^x for x <= 0 to 1e-4, a tenth of what rounding a score's query and key to int8 does to it; 0 from -127 down.
inline V power_of_two(V x) {
    const V y = max(x, V::set(-127.0f));
    const V shifted = y + V::set(kMagic), r = y - (shifted - V::set(kMagic));
    V p = fma(V::set(5.50089329e-2f), r, V::set(2.42210969e-1f));
    p = fma(p, r, V::set(6.93282902e-1f));
    p = fma(p, r, V::set(1.0f));
    return times_power(p, shifted);
}

// Scores in w, of which [low, high) count, to rounded weights in its low bits; a weight of one stands for `unit`.
__attribute__((noinline)) void int8_softmax(float* w, const Int8Tile& view, int low, int high, float query_scale, float* peak,
                         float* mass, float* unit) {
    constexpr int W = V::width, N = 8 / W;
    for (int key = view.begin; key < low; key++) w[key] = -INFINITY;
    for (int key = std::max(high, view.begin); key < view.end; key++) w[key] = -INFINITY;
    V tops[N], total[N], most[N];
    for (int j = 0; j < N; j++) tops[j] = V::set(-INFINITY), total[j] = most[j] = V::set(0);
    for (int key = view.begin; key < view.end; key += 8)
        for (int j = 0; j < N; j++) tops[j] = max(tops[j], V::load(w + key + j * W));
    for (int j = 1; j < N; j++) tops[0] = max(tops[0], tops[j]);
    const float top = tops[0].max_lane();
    const V shift = V::set(top), scale = V::set(query_scale * 1.44269504f);
    for (int key = view.begin; key < view.end; key += 8)
        for (int j = 0; j < N; j++) {
            float* at = w + key + j * W;
            const V p = power_of_two((V::load(at) - shift) * scale);
            const V weight = p * V::load(view.value_scale + key + j * W);
            total[j] = total[j] + p;
            most[j] = max(most[j], weight);
            weight.store(at);
        }
    for (int j = 1; j < N; j++) most[0] = max(most[0], most[j]);
    const float largest = most[0].max_lane();
    *unit = largest > kTiny ? largest / float(kTopWeight) : 0.0f;
    const V levels = V::set(largest > kTiny ? float(kTopWeight) / largest : 0.0f), rounding = V::set(kMagic);
    for (int key = view.begin; key < view.end; key += W) (V::load(w + key) * levels + rounding).store(w + key);
    float sums[8];
    for (int j = 0; j < N; j++) total[j].store(sums + j * W);
    *peak = top * query_scale;
    *mass = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

template <int NQ, int D, class Source>
void attend_int8_queries(const float* const* q, const int* low, const int* high, const Source& source,
                         const Int8Tile& view, int d, float* const* out, float* peak, float* mass) {
    alignas(64) float w[NQ * kTile];
    const int8_t* query[NQ];
    float unit[NQ];
    for (int a = 0; a < NQ; a++) query[a] = reinterpret_cast<const int8_t*>(q[a]);
    int8_scores<NQ, D>(query, source, view, d, w);
    for (int a = 0; a < NQ; a++) {
        if (low[a] >= high[a]) {
            peak[a] = -INFINITY;
            mass[a] = unit[a] = 0.0f;
            std::fill(w + a * kTile, w + (a + 1) * kTile, kMagic);  // any number will do
            continue;
        }
        float query_scale;
        std::memcpy(&query_scale, query[a] + d, sizeof query_scale);
        int8_softmax(w + a * kTile, view, low[a], high[a], query_scale, peak + a, mass + a, unit + a);
    }
    Weights<NQ> weights;
    weights.take(w, view.begin, view.end);
    int8_weigh<NQ>(weights, source, view, d, unit, out);
}

template <class Source>
void attend_int8_from(const float* const* q, int queries, const int* low, const int* high, const Source& source,
                      const Int8Tile& view, int d, float* const* out, float* peak, float* mass) {
    const auto attend = [&](auto count, int a) {
        constexpr int NQ = decltype(count)::value;
        if (d == 64)
            attend_int8_queries<NQ, 64>(q + a, low + a, high + a, source, view, d, out + a, peak + a, mass + a);
        else
            attend_int8_queries<NQ, 0>(q + a, low + a, high + a, source, view, d, out + a, peak + a, mass + a);
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
#if PACELINE_VNNI
    attend_int8_from(q, queries, low, high, InterleavedKeys(view, d), view, d, out, peak, mass);
#else
    attend_int8_from(q, queries, low, high, view, view, d, out, peak, mass);
#endif
}

}  // namespace
}  // namespace paceline
