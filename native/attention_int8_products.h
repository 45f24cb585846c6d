// The two integer products of attention over int8 keys and values: queries with keys, weights with values.
//
// In NEON, and plainly for everybody else: integer sums are exact, so both give the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_int8_tile.h"

namespace paceline {
namespace {

constexpr int kLargestHead = 256;

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

}  // namespace
}  // namespace paceline
