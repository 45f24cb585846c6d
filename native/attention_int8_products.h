// The two integer products of attention over int8 keys and values: queries with keys, weights with values.
//
// In NEON, in AVX2 and in AVX-512 (files of their own), and plainly for everybody else: integer sums are exact, so all give
// the same bits. Keys and values are taken from the cache (Int8Tile), or from where somebody has laid them out anew.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_int8_tile.h"

#if PACELINE_VNNI
#include "attention_int8_vnni.h"
#elif PACELINE_AVX2
#include "attention_int8_avx2.h"
#else

namespace paceline {
namespace {

#if PACELINE_NEON

template <int D> constexpr int width_of(int d) { return D ? D : d; }

// out[a * kTile + key] = (query . key) * scale of the key, for the fours of keys that [from, to) touches.
template <int NQ, int D, class Source>
__attribute__((noinline)) void int8_scores(const int8_t* const* q, const Source&, const Int8Tile& view, int size, float* out) {
    const int d = width_of<D>(size);
    const int32x4_t zero = {kMagicBits, 0, 0, 0};
    const float32x4_t magic = vdupq_n_f32(kMagic);
    for (int key = view.from / 4 * 4; key < view.to; key += 4) {
        const int8_t* k[4];
        for (int b = 0; b < 4; b++) {
            k[b] = static_cast<const int8_t*>(view.key[key + b]);
            for (int line = 0; line < d; line += 64) __builtin_prefetch(k[b] + view.ahead[key / 4] + line);
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

// The weights of up to three queries as bytes: for each four of keys four bytes a query, so that a lane of a register is
// what udot multiplies a feature of four tokens with. Values are 128 above themselves: `base`, which sums begin with, makes
// up for it.
template <int NQ> struct Weights {
    alignas(16) uint8_t bytes[kTile / 4][16];  // from view.begin on; the fourth of four is never read
    int32_t base[NQ];

    // w[a * kTile + key] holds the weight in its low bits.
    void take(const float* w, int begin, int end) {
        uint32x4_t sums[NQ];
        for (int a = 0; a < NQ; a++) sums[a] = vdupq_n_u32(0);
        for (int key = begin; key < end; key += 16) {
            uint32x4x4_t fours = {};
            for (int a = 0; a < NQ; a++) {
                const auto halves = [&](int j) {
                    const float* at = w + a * kTile + key + 8 * j;
                    return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_f32(vld1q_f32(at)), vreinterpretq_u16_f32(vld1q_f32(at + 4))));
                };
                const uint8x16_t all = vuzp1q_u8(halves(0), halves(1));
                sums[a] = vdotq_u32(sums[a], all, vdupq_n_u8(1));
                fours.val[a] = vreinterpretq_u32_u8(all);
            }
            vst4q_u32(reinterpret_cast<uint32_t*>(bytes[(key - begin) / 4]), fours);
        }
        for (int a = 0; a < NQ; a++) base[a] = kMagicBits - 128 * int32_t(vaddvq_u32(sums[a]));
    }
};

// Values with four tokens of a feature side by side, feature after feature, as sdot wants them.
struct Interleaved {
    alignas(64) uint8_t values[kTile * kLargestHead];  // [fours of tokens from view.begin on][d][4]

    Interleaved(const Int8Tile& view, int d) {
        for (int token = view.begin; token < view.end; token += 4)
            for (int i = 0; i < d; i += 16) {
                uint8x16x4_t four;
                for (int b = 0; b < 4; b++) four.val[b] = vld1q_u8(static_cast<const uint8_t*>(view.value[token + b]) + i);
                vst4q_u8(values + (token - view.begin) * d + 4 * i, four);
            }
    }
};

// Sixteen features of four tokens side by side into v27, v28, v25, v24; x9 steps through the tokens, whose vectors are at
// x10 to x13. In assembly because with 24 sums the compiler copies registers about: a third of the loop's time.
#define PACELINE_FROM_CACHE(offset)                                                          \
    "ldr q24, [x10, " offset "]\nldr q25, [x11, " offset "]\n"                               \
    "ldr q26, [x12, " offset "]\nldr q27, [x13, " offset "]\n"                               \
    "zip1 v28.16b, v24.16b, v25.16b\nzip2 v24.16b, v24.16b, v25.16b\n"                       \
    "zip1 v25.16b, v26.16b, v27.16b\nzip2 v26.16b, v26.16b, v27.16b\n"                       \
    "zip1 v27.8h, v28.8h, v25.8h\nzip2 v28.8h, v28.8h, v25.8h\n"                             \
    "zip1 v25.8h, v24.8h, v26.8h\nzip2 v24.8h, v24.8h, v26.8h\n"
#define PACELINE_TOKENS                                                                      \
    "add x15, x9, x6\nldp x15, x16, [x15]\nldr x17, [x7], #8\nadd x17, x17, x8\n"            \
    "prfm pldl1keep, [x15, x17]\nprfm pldl1keep, [x16, x17]\n"                               \
    "ldp x10, x11, [x9]\nldp x12, x13, [x9, #16]\nadd x9, x9, #32\n"
#define PACELINE_INTERLEAVED(at) "ldp q27, q28, [x9, #" #at "]\nldp q25, q24, [x9, #" #at " + 32]\n"
#define PACELINE_QUERY(s0, s1, s2, s3, lane)                                                 \
    "udot %" #s0 ".4s, v27.16b, v31.4b[" #lane "]\nudot %" #s1 ".4s, v28.16b, v31.4b[" #lane "]\n" \
    "udot %" #s2 ".4s, v25.16b, v31.4b[" #lane "]\nudot %" #s3 ".4s, v24.16b, v31.4b[" #lane "]\n"
#define PACELINE_FIRST_1 PACELINE_QUERY(0, 1, 2, 3, 0)
#define PACELINE_FIRST_2 PACELINE_FIRST_1 PACELINE_QUERY(8, 9, 10, 11, 1)
#define PACELINE_FIRST_3 PACELINE_FIRST_2 PACELINE_QUERY(16, 17, 18, 19, 2)
#define PACELINE_SECOND_1 PACELINE_QUERY(4, 5, 6, 7, 0)
#define PACELINE_SECOND_2 PACELINE_SECOND_1 PACELINE_QUERY(12, 13, 14, 15, 1)
#define PACELINE_SECOND_3 PACELINE_SECOND_2 PACELINE_QUERY(20, 21, 22, 23, 2)
#define PACELINE_BEGIN(a, b, c, d, e, f, g, h)                                               \
    "ld1r {%" #a ".4s}, [x15], #4\n"                                                         \
    "mov %" #b ".16b, %" #a ".16b\nmov %" #c ".16b, %" #a ".16b\nmov %" #d ".16b, %" #a ".16b\n" \
    "mov %" #e ".16b, %" #a ".16b\nmov %" #f ".16b, %" #a ".16b\nmov %" #g ".16b, %" #a ".16b\n" \
    "mov %" #h ".16b, %" #a ".16b\n"
#define PACELINE_BEGIN_1 PACELINE_BEGIN(0, 1, 2, 3, 4, 5, 6, 7)
#define PACELINE_BEGIN_2 PACELINE_BEGIN_1 PACELINE_BEGIN(8, 9, 10, 11, 12, 13, 14, 15)
#define PACELINE_BEGIN_3 PACELINE_BEGIN_2 PACELINE_BEGIN(16, 17, 18, 19, 20, 21, 22, 23)
#define PACELINE_SUMS(x) "=&w"(x[0]), "=&w"(x[1]), "=&w"(x[2]), "=&w"(x[3]), "=&w"(x[4]), "=&w"(x[5]), "=&w"(x[6]), "=&w"(x[7])
#define PACELINE_WEIGH(TOKENS, FIRST, SECOND, QUERIES, STEP, ...)                            \
    asm volatile("mov x9, %[source]\nmov x14, %[weights]\nadd x15, x14, #256\n"              \
                 "ldp x4, x5, [%[run]]\nldp x6, x7, [%[run], #16]\nldr x8, [%[run], #32]\n" PACELINE_BEGIN_##QUERIES \
                 "1:\n" TOKENS "ldr q31, [x14], #16\n"                                       \
                 FIRST PACELINE_FIRST_##QUERIES SECOND PACELINE_SECOND_##QUERIES             \
                 STEP "cmp x9, %[end]\nb.ne 1b\n"                                            \
                 : __VA_ARGS__                                                               \
                 : [source] "r"(source), [end] "r"(end), [weights] "r"(&weights), [run] "r"(&run) \
                 : "v24", "v25", "v26", "v27", "v28", "v31", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", \
                   "x15", "x16", "x17", "cc", "memory")
#define PACELINE_WEIGH_ALL(TOKENS, FIRST, SECOND, STEP)                                      \
    if constexpr (NQ == 1)                                                                   \
        PACELINE_WEIGH(TOKENS, FIRST, SECOND, 1, STEP, PACELINE_SUMS(sums[0]));              \
    else if constexpr (NQ == 2)                                                              \
        PACELINE_WEIGH(TOKENS, FIRST, SECOND, 2, STEP, PACELINE_SUMS(sums[0]), PACELINE_SUMS(sums[1])); \
    else                                                                                     \
        PACELINE_WEIGH(TOKENS, FIRST, SECOND, 3, STEP, PACELINE_SUMS(sums[0]), PACELINE_SUMS(sums[1]), PACELINE_SUMS(sums[2]))

// What a run over the tokens goes by: x4 to x8 in the loop.
struct Run {
    int64_t first = 0, second = 0;  // where sixteen features are: from the vectors' beginnings, or from row to row
    int64_t which = 0;              // of four tokens, two whose lines to come are asked for
    const int64_t* ahead = nullptr; // how far on those are, four tokens after the other
    int64_t line = 0;               // which of a vector's
};

// The tokens of [view.begin, view.end) weighed, for the 32 features from i on: eight vectors of sums a query. Where only
// sixteen are left the others are of no use.
template <int NQ>
inline void weigh_features(const Interleaved& values, const Int8Tile& view, const Weights<NQ>& weights, int d, int i,
                           int32x4_t (*sums)[8]) {
    const Run run{4 * d};
    const uint8_t* source = values.values + 4 * i;
    const uint8_t* end = source + (view.end - view.begin) / 4 * run.first;
    PACELINE_WEIGH_ALL("", PACELINE_INTERLEAVED(0), PACELINE_INTERLEAVED(64), "add x9, x9, x4\n");
}

template <int NQ>
inline void weigh_features(const Int8Tile& values, const Int8Tile& view, const Weights<NQ>& weights, int d, int i,
                           int32x4_t (*sums)[8]) {
    // Two runs over the tokens ask for a line of every one.
    const Run run{i, i + 32 <= d ? i + 16 : i, i % 64 / 2, view.ahead + view.begin / 4, i / 64 * 64};
    const void* const* source = values.value + view.begin;
    const void* const* end = values.value + view.end;
    PACELINE_WEIGH_ALL(PACELINE_TOKENS, PACELINE_FROM_CACHE("x4"), PACELINE_FROM_CACHE("x5"), "");
}

// out[a] = unit[a] * sum of weight * value. The sums stay below 2^22.
template <int NQ, class Source>
inline void int8_weigh(const Weights<NQ>& weights, const Source& values, const Int8Tile& view, int d, const float* unit,
                       float* const* out) {
    const float32x4_t magic = vdupq_n_f32(kMagic);
    for (int i = 0; i < d; i += 32) {
        int32x4_t sums[NQ][8];
        const auto finish = [&](int a, int j, int32x4_t sum) {
            if (i + 4 * j >= d) return;
            vst1q_f32(out[a] + i + 4 * j, vmulq_n_f32(vsubq_f32(vreinterpretq_f32_s32(sum), magic), unit[a]));
        };
        const auto finish_query = [&](int a) {  // by name, not in a loop: the sums stay in registers then
            finish(a, 0, sums[a][0]), finish(a, 1, sums[a][1]), finish(a, 2, sums[a][2]), finish(a, 3, sums[a][3]);
            finish(a, 4, sums[a][4]), finish(a, 5, sums[a][5]), finish(a, 6, sums[a][6]), finish(a, 7, sums[a][7]);
        };
        weigh_features<NQ>(values, view, weights, d, i, sums);
        finish_query(0);
        if constexpr (NQ > 1) finish_query(1);
        if constexpr (NQ > 2) finish_query(2);
    }
}

#else

template <int NQ, int D, class Source>
inline void int8_scores(const int8_t* const* q, const Source&, const Int8Tile& view, int d, float* out) {
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

    void take(const float* w, int begin, int end) {
        for (int a = 0; a < NQ; a++)
            for (int key = begin; key < end; key++) {
                int32_t bits;
                std::memcpy(&bits, w + a * kTile + key, 4);
                value[a][key] = bits & 0xff;
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
            const uint8_t* v = static_cast<const uint8_t*>(view.value[token]);
            const int32_t weight = weights.value[a][token];
            for (int i = 0; i < d; i++) sum[i] += weight * (int32_t(v[i]) - 128);
        }
        for (int i = 0; i < d; i++) out[a][i] = float(sum[i]) * unit[a];
    }
}

#endif

}  // namespace
}  // namespace paceline

#endif
