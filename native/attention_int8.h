// Attention over int8 keys and values, in integers as far as they go.
//
// Scores are integer products of int8 queries and keys. A key's weight, e^(score - peak) times the scale of its value,
// becomes a whole number up to kTopWeight (15 bits, a share of the largest scale that the query sees in the tile), so
// that the weighted sum of values is an integer too. What is left in float is elementwise but for the sum of the
// weights, which has one order: every instruction set gives the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace paceline {
namespace {

// A weight is 256 * high + low with low a signed byte and high at most 127: two digits that sdot can take.
constexpr int kTopWeight = 127 * 256 + 127;
constexpr float kTiny = 1e-30f;  // scales below this stand for zeros; their inverse could overflow
constexpr int kLargestHead = 256;

// d floats to int8 (d a multiple of 16); returns their scale. `out` may be where x begins.
inline float round_to_int8(const float* x, int d, int8_t* out) {
    constexpr int W = V::width;
    V top = abs(V::load(x));
    for (int i = W; i < d; i += W) top = max(top, abs(V::load(x + i)));
    const float scale = top.max_lane() / 127.0f;
    if (scale <= kTiny) {
        std::memset(out, 0, size_t(d));
        return 0.0f;
    }
    const float inverse = 1.0f / scale;
    for (int i = 0; i < d; i += 16) {
#if PACELINE_NEON
        int32x4_t n[4];
        for (int j = 0; j < 4; j++) n[j] = vreinterpretq_s32_f32((V::load(x + i + 4 * j) * V::set(inverse) + V::set(kMagic)).v);
        vst1q_s8(out + i, vuzp1q_s8(vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(n[0]), vreinterpretq_s16_s32(n[1]))),
                                    vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_s32(n[2]), vreinterpretq_s16_s32(n[3])))));
#else
        int8_t n[16];
        for (int j = 0; j < 16; j++)
            n[j] = int8_t(std::nearbyint(std::fmin(std::fmax(x[i + j] * inverse, -127.0f), 127.0f)));
        std::memcpy(out + i, n, 16);
#endif
    }
    return scale;
}

// In place: a query of d floats becomes d int8 values with their scale behind them.
void pack_query(float* x, int d) {
    int8_t* values = reinterpret_cast<int8_t*>(x);
    const float scale = round_to_int8(x, d, values);
    const float positive = scale == 0.0f ? 1.0f : scale;  // all zeros: any scale will do but 0, which -inf must not meet
    std::memcpy(values + d, &positive, sizeof positive);
}

// 2^x for x <= 0 to 1e-4, a tenth of what rounding a score's query and key to int8 does to it; 0 from -127 down.
inline V power_of_two(V x) {
    const V y = max(x, V::set(-127.0f));
    const V shifted = y + V::set(kMagic), r = y - (shifted - V::set(kMagic));
    V p = fma(V::set(5.50089329e-2f), r, V::set(2.42210969e-1f));
    p = fma(p, r, V::set(6.93282902e-1f));
    p = fma(p, r, V::set(1.0f));
    return times_power(p, shifted);
}

// The part [from, to) of a tile that is looked at, in whole sixteens [begin, end). Tokens that are not there have the
// vectors of one that is, and scales of 0.
struct Int8Tile {
    int from, to, begin, end;
    const void* const* key;
    const void* const* value;
    const float* key_scale;
    const float* value_scale;
    int64_t ahead;

    Int8Tile(const KeyTile& tile, int first, int last)
        : from(first), to(last), begin(first / 16 * 16), end((last + 15) / 16 * 16), key(tile.key), value(tile.value),
          key_scale(tile.key_scale), value_scale(tile.value_scale), ahead(tile.ahead) {
        if (end <= tile.count) return;
        for (int token = begin; token < end; token++) {
            const int there = std::min(token, tile.count - 1);
            padded_.key[token] = tile.key[there];
            padded_.value[token] = tile.value[there];
            padded_.key_scale[token] = token < tile.count ? tile.key_scale[token] : 0.0f;
            padded_.value_scale[token] = token < tile.count ? tile.value_scale[token] : 0.0f;
        }
        key = padded_.key;
        value = padded_.value;
        key_scale = padded_.key_scale;
        value_scale = padded_.value_scale;
    }
    Int8Tile(const Int8Tile&) = delete;
    Int8Tile& operator=(const Int8Tile&) = delete;

  private:
    KeyTile padded_;
};

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

#if PACELINE_NEON

template <int D> constexpr int width_of(int d) { return D ? D : d; }

// out[a * kTile + key] = (query . key) * scale of the key, for the fours of keys that [from, to) touches.
template <int NQ, int D>
__attribute__((noinline)) void int8_scores(const int8_t* const* q, const Int8Tile& view, int size, float* out) {
    const int d = width_of<D>(size);
    const int32x4_t zero = {kMagicBits, 0, 0, 0};
    const float32x4_t magic = vdupq_n_f32(kMagic);
    for (int key = view.from / 4 * 4; key < view.to; key += 4) {
        const int8_t* k[4];
        for (int b = 0; b < 4; b++) {
            k[b] = static_cast<const int8_t*>(view.key[key + b]);
            for (int line = 0; line < d; line += 64) __builtin_prefetch(k[b] + view.ahead + line);
        }
        int32x4_t sum[NQ][4];
        for (int a = 0; a < NQ; a++)
            for (int b = 0; b < 4; b++) sum[a][b] = zero;
#pragma GCC unroll 4
        for (int i = 0; i < d; i += 16) {
            const int8x16_t x[4] = {vld1q_s8(k[0] + i), vld1q_s8(k[1] + i), vld1q_s8(k[2] + i), vld1q_s8(k[3] + i)};
            for (int a = 0; a < NQ; a++) {
                const int8x16_t y = vld1q_s8(q[a] + i);
                for (int b = 0; b < 4; b++) sum[a][b] = vdotq_s32(sum[a][b], y, x[b]);
            }
        }
        const float32x4_t scale = vld1q_f32(view.key_scale + key);
        for (int a = 0; a < NQ; a++) {
            const int32x4_t dots = vpaddq_s32(vpaddq_s32(sum[a][0], sum[a][1]), vpaddq_s32(sum[a][2], sum[a][3]));
            vst1q_f32(out + a * kTile + key, vmulq_f32(vsubq_f32(vreinterpretq_f32_s32(dots), magic), scale));
        }
    }
}

// The digits of up to three queries: for each four of keys, four bytes a digit, high and low of one query after the
// other, so that a lane of a register is what sdot multiplies a feature of four tokens with.
template <int NQ> struct Weights {
    alignas(16) int8_t two[kTile / 4][16];  // of the first two queries, from view.begin on
    int8_t third[kTile / 4][8];             // of the third, or of an only one

    // w[a * kTile + key] holds weight + 128 in its low bits: the second byte is the high digit and the first one 128
    // above the low.
    void split(const float* w, int begin, int end) {
        const int8x16_t offset = vdupq_n_s8(-128);
        for (int key = begin; key < end; key += 16) {
            int32x4_t high[NQ], low[NQ];
            for (int a = 0; a < NQ; a++) {
                int8x16_t n[2];
                for (int j = 0; j < 2; j++) {
                    const float* at = w + a * kTile + key + 8 * j;
                    n[j] = vreinterpretq_s8_s16(vuzp1q_s16(vreinterpretq_s16_f32(vld1q_f32(at)),
                                                           vreinterpretq_s16_f32(vld1q_f32(at + 4))));
                }
                high[a] = vreinterpretq_s32_s8(vuzp2q_s8(n[0], n[1]));
                low[a] = vreinterpretq_s32_s8(veorq_s8(vuzp1q_s8(n[0], n[1]), offset));
            }
            if constexpr (NQ >= 2)
                vst4q_s32(reinterpret_cast<int32_t*>(two[(key - begin) / 4]), {{high[0], low[0], high[1], low[1]}});
            if constexpr (NQ != 2)
                vst2q_s32(reinterpret_cast<int32_t*>(third[(key - begin) / 4]), {{high[NQ - 1], low[NQ - 1]}});
        }
    }
};

// Values with four tokens of a feature side by side, feature after feature, as sdot wants them.
struct Interleaved {
    alignas(64) int8_t values[kTile * kLargestHead];  // [fours of tokens from view.begin on][d][4]

    Interleaved(const Int8Tile& view, int d) {
        for (int token = view.begin; token < view.end; token += 4)
            for (int i = 0; i < d; i += 16) {
                int8x16x4_t four;
                for (int b = 0; b < 4; b++) four.val[b] = vld1q_s8(static_cast<const int8_t*>(view.value[token + b]) + i);
                vst4q_s8(values + (token - view.begin) * d + 4 * i, four);
            }
    }
};

// Sixteen features of four tokens side by side into v27, v28, v25, v24; x9 steps through the tokens. In assembly because
// with 24 sums the compiler copies registers about: a third of the loop's time.
#define PACELINE_FROM_CACHE                                                                  \
    "ldr x15, [x9, %[which]]\nprfm pldl1keep, [x15, %[ahead]]\n"                             \
    "ldp x10, x11, [x9]\nldp x12, x13, [x9, #16]\nadd x9, x9, #32\n"                         \
    "ldr q24, [x10, %[step]]\nldr q25, [x11, %[step]]\n"                                     \
    "ldr q26, [x12, %[step]]\nldr q27, [x13, %[step]]\n"                                     \
    "zip1 v28.16b, v24.16b, v25.16b\nzip2 v24.16b, v24.16b, v25.16b\n"                       \
    "zip1 v25.16b, v26.16b, v27.16b\nzip2 v26.16b, v26.16b, v27.16b\n"                       \
    "zip1 v27.8h, v28.8h, v25.8h\nzip2 v28.8h, v28.8h, v25.8h\n"                             \
    "zip1 v25.8h, v24.8h, v26.8h\nzip2 v24.8h, v24.8h, v26.8h\n"
#define PACELINE_INTERLEAVED "ldp q27, q28, [x9]\nldp q25, q24, [x9, #32]\nadd x9, x9, %[step]\n"
#define PACELINE_QUERY(h0, h1, h2, h3, l0, l1, l2, l3, w, high, low)                         \
    "sdot %" #h0 ".4s, v27.16b, " w ".4b[" #high "]\nsdot %" #l0 ".4s, v27.16b, " w ".4b[" #low "]\n" \
    "sdot %" #h1 ".4s, v28.16b, " w ".4b[" #high "]\nsdot %" #l1 ".4s, v28.16b, " w ".4b[" #low "]\n" \
    "sdot %" #h2 ".4s, v25.16b, " w ".4b[" #high "]\nsdot %" #l2 ".4s, v25.16b, " w ".4b[" #low "]\n" \
    "sdot %" #h3 ".4s, v24.16b, " w ".4b[" #high "]\nsdot %" #l3 ".4s, v24.16b, " w ".4b[" #low "]\n"
#define PACELINE_ZERO(a, b, c, d, e, f, g, h)                                                \
    "mov %" #a ".16b, v24.16b\nmov %" #b ".16b, v24.16b\nmov %" #c ".16b, v24.16b\nmov %" #d ".16b, v24.16b\n" \
    "mov %" #e ".16b, v24.16b\nmov %" #f ".16b, v24.16b\nmov %" #g ".16b, v24.16b\nmov %" #h ".16b, v24.16b\n"
#define PACELINE_SUMS(x) "=&w"(x[0]), "=&w"(x[1]), "=&w"(x[2]), "=&w"(x[3]), "=&w"(x[4]), "=&w"(x[5]), "=&w"(x[6]), "=&w"(x[7])
#define PACELINE_WEIGH(NQ, SOURCE, ZERO, WEIGHTS, QUERIES, ...)                              \
    asm volatile("mov x9, %[source]\nmov x14, %[digits]\nadd x16, x14, #256\n"               \
                 "mov w10, #0x4b400000\ndup v24.4s, w10\n" ZERO                              \
                 "1:\n" SOURCE WEIGHTS QUERIES "cmp x9, %[end]\nb.ne 1b\n"                   \
                 : __VA_ARGS__                                                               \
                 : [source] "r"(source), [end] "r"(end), [step] "r"(step), [digits] "r"(digits), [which] "r"(which), [ahead] "r"(ahead) \
                 : "v24", "v25", "v26", "v27", "v28", "v30", "v31", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", \
                   "cc", "memory")
#define PACELINE_ONE PACELINE_QUERY(0, 1, 2, 3, 4, 5, 6, 7, "v31", 0, 1)
#define PACELINE_TWO PACELINE_QUERY(0, 1, 2, 3, 4, 5, 6, 7, "v30", 0, 1) PACELINE_QUERY(8, 9, 10, 11, 12, 13, 14, 15, "v30", 2, 3)
#define PACELINE_THREE PACELINE_TWO PACELINE_QUERY(16, 17, 18, 19, 20, 21, 22, 23, "v31", 0, 1)
#define PACELINE_LOAD_TWO "ldr q30, [x14], #16\n"
#define PACELINE_LOAD_THIRD "ldr d31, [x16], #8\n"
#define PACELINE_WEIGH_ALL(SOURCE)                                                           \
    if constexpr (NQ == 1)                                                                   \
        PACELINE_WEIGH(1, SOURCE, PACELINE_ZERO(0, 1, 2, 3, 4, 5, 6, 7), PACELINE_LOAD_THIRD, PACELINE_ONE, \
                       PACELINE_SUMS(sums[0]));                                              \
    else if constexpr (NQ == 2)                                                              \
        PACELINE_WEIGH(2, SOURCE, PACELINE_ZERO(0, 1, 2, 3, 4, 5, 6, 7) PACELINE_ZERO(8, 9, 10, 11, 12, 13, 14, 15), \
                       PACELINE_LOAD_TWO, PACELINE_TWO, PACELINE_SUMS(sums[0]), PACELINE_SUMS(sums[1])); \
    else                                                                                     \
        PACELINE_WEIGH(3, SOURCE, PACELINE_ZERO(0, 1, 2, 3, 4, 5, 6, 7) PACELINE_ZERO(8, 9, 10, 11, 12, 13, 14, 15) \
                       PACELINE_ZERO(16, 17, 18, 19, 20, 21, 22, 23), PACELINE_LOAD_TWO PACELINE_LOAD_THIRD, \
                       PACELINE_THREE, PACELINE_SUMS(sums[0]), PACELINE_SUMS(sums[1]), PACELINE_SUMS(sums[2]))

// The tokens of [view.begin, view.end) weighed, for the sixteen features from i on: sums[a] holds the four vectors of
// the high digit, then those of the low one.
template <int NQ>
inline void weigh_features(const Interleaved& values, const Int8Tile& view, const Weights<NQ>& weights, int d, int i,
                           int32x4_t (*sums)[8]) {
    const Weights<NQ>* digits = &weights;
    const int8_t* source = values.values + 4 * i;
    const int64_t step = 4 * d, which = 0, ahead = 0;
    const int8_t* end = source + (view.end - view.begin) / 4 * step;
    PACELINE_WEIGH_ALL(PACELINE_INTERLEAVED);
}

template <int NQ>
inline void weigh_features(const Int8Tile& values, const Int8Tile& view, const Weights<NQ>& weights, int, int i,
                           int32x4_t (*sums)[8]) {
    const Weights<NQ>* digits = &weights;
    const void* const* source = values.value + view.begin;
    const void* const* end = values.value + view.end;
    // Four runs over the tokens ask for a line of every one.
    const int64_t step = i, which = i % 64 / 2, ahead = view.ahead + i / 64 * 64;
    PACELINE_WEIGH_ALL(PACELINE_FROM_CACHE);
}

// out[a] = unit[a] * sum of weight * value. The sums of either digit stay below 2^21.
template <int NQ, class Source>
inline void int8_weigh(const Weights<NQ>& weights, const Source& values, const Int8Tile& view, int d, const float* unit,
                       float* const* out) {
    const float32x4_t magic = vdupq_n_f32(kMagic), base = vdupq_n_f32(256.0f);
    for (int i = 0; i < d; i += 16) {
        int32x4_t sums[NQ][8];
        weigh_features<NQ>(values, view, weights, d, i, sums);
        // By name, not in a loop: the sums stay in registers then.
        const auto finish = [&](int a, int j, int32x4_t highs, int32x4_t lows) {
            const float32x4_t high = vsubq_f32(vreinterpretq_f32_s32(highs), magic);
            const float32x4_t low = vsubq_f32(vreinterpretq_f32_s32(lows), magic);
            vst1q_f32(out[a] + i + 4 * j, vmulq_n_f32(vfmaq_f32(low, high, base), unit[a]));
        };
        const auto finish_query = [&](auto query) {
            constexpr int a = decltype(query)::value;
            if constexpr (a < NQ) {
                finish(a, 0, sums[a][0], sums[a][4]);
                finish(a, 1, sums[a][1], sums[a][5]);
                finish(a, 2, sums[a][2], sums[a][6]);
                finish(a, 3, sums[a][3], sums[a][7]);
            }
        };
        finish_query(std::integral_constant<int, 0>());
        finish_query(std::integral_constant<int, 1>());
        finish_query(std::integral_constant<int, 2>());
    }
}

#else

template <int NQ, int D> inline void int8_scores(const int8_t* const* q, const Int8Tile& view, int d, float* out) {
    for (int key = view.from; key < view.to; key++) {
        const int8_t* k = static_cast<const int8_t*>(view.key[key]);
        for (int a = 0; a < NQ; a++) {
            int32_t dot = 0;
            for (int i = 0; i < d; i++) dot += int32_t(q[a][i]) * int32_t(k[i]);
            out[a * kTile + key] = float(dot) * view.key_scale[key];
        }
    }
}

template <int NQ> struct Weights {
    int32_t value[NQ][kTile];

    void split(const float* w, int begin, int end) {
        for (int a = 0; a < NQ; a++)
            for (int key = begin; key < end; key++) {
                int32_t bits;
                std::memcpy(&bits, w + a * kTile + key, 4);
                value[a][key] = (bits & 0xffff) - 128;
            }
    }
};

template <int NQ, class Source>
inline void int8_weigh(const Weights<NQ>& weights, const Source&, const Int8Tile& view, int d, const float* unit,
                       float* const* out) {
    int32_t sum[kLargestHead];
    for (int a = 0; a < NQ; a++) {
        std::fill(sum, sum + d, 0);
        for (int token = view.from; token < view.to; token++) {
            const int8_t* v = static_cast<const int8_t*>(view.value[token]);
            const int32_t weight = weights.value[a][token];
            for (int i = 0; i < d; i++) sum[i] += weight * int32_t(v[i]);
        }
        for (int i = 0; i < d; i++) out[a][i] = float(sum[i]) * unit[a];
    }
}

#endif

// Scores in w, of which [low, high) count, to rounded weights in its low bits, 128 added.
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
    const V shift = V::set(top), scale = V::set(query_scale * 1.44269504f), rounding = V::set(kMagic + 128.0f);
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
    weights.split(w, view.begin, view.end);
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
