// The products of 4 or 8 rows of activations with a group of weights, in NEON assembly.
//
// Compilers spill here: a tile wants all 32 vector registers. Three more things are worth an instruction each:
//  - An integer sum starts at the bits of 1.5 * 2^23. Read as a float it is then 1.5 * 2^23 + the sum, exactly, and a
//    subtraction makes a float of it; the conversion instruction costs four times as much.
//  - That start value is loaded for each sum instead of copied: the load ports are idle, the vector ports are not.
//  - Float operations come in batches: between integer dot products each one costs the ports an extra cycle.
#pragma once

#include "kernels.h"

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

namespace paceline {
namespace {

alignas(16) constexpr int32_t kStart[4] = {0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000};

#define PACELINE_ALL_VECTORS                                                                                      \
    "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16",  \
        "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

// ---------------------------------------------------------------- 8 rows of activations x 4 rows of weights
// v0-7: the outputs so far; v8-15: integer sums of this block; v16-23: the block's weights, unpacked; v24-29:
// activations; v31: the mask of a low nibble.

#define PACELINE_LANE(a, b, w, x, y, l) \
    "sdot v" #a ".4s, v" #w ".16b, v" #x ".4b[" #l "]\n sdot v" #b ".4s, v" #w ".16b, v" #y ".4b[" #l "]\n"
#define PACELINE_LANES(a, b, w0, w1, w2, w3, x, y)                                      \
    PACELINE_LANE(a, b, w0, x, y, 0) PACELINE_LANE(a, b, w1, x, y, 1) PACELINE_LANE(a, b, w2, x, y, 2) \
    PACELINE_LANE(a, b, w3, x, y, 3)

// Two rows of activations, whose sums are v<a> and v<b>.
#define PACELINE_PAIR(a, b, from, at, bt, x0, x1, y0, y1)                                             \
    "ldr q" #a ", [%[start]]\n ldr q" #b ", [%[start]]\n"                                             \
    "ldp q" #x0 ", q" #x1 ", [%[" #from "], #" #at "]\n ldp q" #y0 ", q" #y1 ", [%[" #from "], #" #bt "]\n" \
    PACELINE_LANES(a, b, 16, 17, 18, 19, x0, y0) PACELINE_LANES(a, b, 20, 21, 22, 23, x1, y1)

#define PACELINE_EACH_SUM(OP) OP(8) OP(9) OP(10) OP(11) OP(12) OP(13) OP(14) OP(15)
#define PACELINE_TO_FLOAT(a) "fsub v" #a ".4s, v" #a ".4s, v30.4s\n"
#define PACELINE_TIMES_SCALE(a) "fmul v" #a ".4s, v" #a ".4s, v24.4s\n"
#define PACELINE_ADD(out, what, factor, lane) "fmla v" #out ".4s, v" #what ".4s, v" #factor ".s[" #lane "]\n"

#define PACELINE_UNPACK_Q4                                                                              \
    "ldr q16, [%[w]]\n ldr q17, [%[w], #32]\n ldr q18, [%[w], #64]\n ldr q19, [%[w], #96]\n"            \
    "ushr v20.16b, v16.16b, #4\n and v16.16b, v16.16b, v31.16b\n"                                       \
    "ushr v21.16b, v17.16b, #4\n and v17.16b, v17.16b, v31.16b\n"                                       \
    "ushr v22.16b, v18.16b, #4\n and v18.16b, v18.16b, v31.16b\n"                                       \
    "ushr v23.16b, v19.16b, #4\n and v19.16b, v19.16b, v31.16b\n"
#define PACELINE_LOAD_Q8                                                                                \
    "ldr q16, [%[w]]\n ldr q17, [%[w], #32]\n ldr q18, [%[w], #64]\n ldr q19, [%[w], #96]\n"            \
    "ldr q20, [%[w], #128]\n ldr q21, [%[w], #160]\n ldr q22, [%[w], #192]\n ldr q23, [%[w], #224]\n"
#define PACELINE_DOTS_8                                                                                 \
    PACELINE_PAIR(8, 9, x, 0, 32, 24, 25, 26, 27) PACELINE_PAIR(10, 11, x, 64, 96, 28, 29, 24, 25)      \
    PACELINE_PAIR(12, 13, x2, 0, 32, 26, 27, 28, 29) PACELINE_PAIR(14, 15, x2, 64, 96, 24, 25, 26, 27)
#define PACELINE_SCALE_8                                                                                \
    "fcvtl v24.4s, v24.4h\n ldr q30, [%[start]]\n"                                                      \
    "ldp q26, q27, [%[x], #128]\n ldp q28, q29, [%[x2], #128]\n"                                        \
    PACELINE_EACH_SUM(PACELINE_TO_FLOAT) PACELINE_EACH_SUM(PACELINE_TIMES_SCALE)                        \
    PACELINE_ADD(0, 8, 26, 0) PACELINE_ADD(1, 9, 26, 1) PACELINE_ADD(2, 10, 26, 2) PACELINE_ADD(3, 11, 26, 3) \
    PACELINE_ADD(4, 12, 28, 0) PACELINE_ADD(5, 13, 28, 1) PACELINE_ADD(6, 14, 28, 2) PACELINE_ADD(7, 15, 28, 3)
#define PACELINE_MINIMA_8                                                                               \
    PACELINE_ADD(0, 25, 27, 0) PACELINE_ADD(1, 25, 27, 1) PACELINE_ADD(2, 25, 27, 2) PACELINE_ADD(3, 25, 27, 3) \
    PACELINE_ADD(4, 25, 29, 0) PACELINE_ADD(5, 25, 29, 1) PACELINE_ADD(6, 25, 29, 2) PACELINE_ADD(7, 25, 29, 3)
#define PACELINE_ZERO_8                                                                                 \
    "movi v0.2d, #0\n movi v1.2d, #0\n movi v2.2d, #0\n movi v3.2d, #0\n"                               \
    "movi v4.2d, #0\n movi v5.2d, #0\n movi v6.2d, #0\n movi v7.2d, #0\n"
#define PACELINE_NEXT(bytes)                                                                            \
    "add %[w], %[w], #" #bytes "\n add %[x], %[x], #160\n add %[x2], %[x2], #160\n"                     \
    "subs %[blocks], %[blocks], #1\n b.ne 1b\n"
#define PACELINE_STORE_8                                                                                \
    "stp q0, q1, [%[out]]\n stp q2, q3, [%[out], #32]\n stp q4, q5, [%[out], #64]\n stp q6, q7, [%[out], #96]\n"

// w: the group's first block, plus 16 bytes for its upper four rows. x, x2: the tiles of the activations' first and
// last four rows. out: [8 rows of activations, 4].
template <Format format>
inline void tile_8(const uint8_t* w, const uint8_t* x, const uint8_t* x2, int64_t blocks, float* out, int upper) {
    if constexpr (format == Format::kQ4) {
        const uint8_t* scales = w + 128 - 8 * upper;
        asm volatile("movi v31.16b, #15\n" PACELINE_ZERO_8
                     "1:\n" PACELINE_UNPACK_Q4 PACELINE_DOTS_8
                     "ldr d24, [%[s]]\n ldr d25, [%[s], #16]\n fcvtl v25.4s, v25.4h\n" PACELINE_SCALE_8 PACELINE_MINIMA_8
                     "add %[s], %[s], #160\n" PACELINE_NEXT(160) PACELINE_STORE_8
                     : [w] "+r"(w), [x] "+r"(x), [x2] "+r"(x2), [blocks] "+r"(blocks), [s] "+r"(scales)
                     : [start] "r"(kStart), [out] "r"(out)
                     : "memory", "cc", PACELINE_ALL_VECTORS);
    } else {
        const uint8_t* scales = w + 256 - 8 * upper;
        asm volatile(PACELINE_ZERO_8
                     "1:\n" PACELINE_LOAD_Q8 PACELINE_DOTS_8
                     "ldr d24, [%[s]]\n" PACELINE_SCALE_8
                     "add %[s], %[s], #272\n" PACELINE_NEXT(272) PACELINE_STORE_8
                     : [w] "+r"(w), [x] "+r"(x), [x2] "+r"(x2), [blocks] "+r"(blocks), [s] "+r"(scales)
                     : [start] "r"(kStart), [out] "r"(out)
                     : "memory", "cc", PACELINE_ALL_VECTORS);
    }
}

// ---------------------------------------------------------------- 4 rows of activations x 8 rows of weights
// v0-3, v4-7: integer sums of the lower and upper four rows of weights; v8-11, v12-15: their outputs so far; v16-19,
// v20-23: the first and second half of the activations' block; v24-27: weights; v28: the mask; v31: the start value.

#define PACELINE_STEP(a, b, w0, w1, x, l) \
    "sdot v" #a ".4s, v" #w0 ".16b, v" #x ".4b[" #l "]\n sdot v" #b ".4s, v" #w1 ".16b, v" #x ".4b[" #l "]\n"
#define PACELINE_STEPS(w0, w1, x0, x1, x2, x3, l)                                                       \
    PACELINE_STEP(0, 4, w0, w1, x0, l) PACELINE_STEP(1, 5, w0, w1, x1, l)                               \
    PACELINE_STEP(2, 6, w0, w1, x2, l) PACELINE_STEP(3, 7, w0, w1, x3, l)
#define PACELINE_LANE_Q4(l, at)                                                                         \
    "ldp q24, q26, [%[w], #" #at "]\n"                                                                  \
    "ushr v25.16b, v24.16b, #4\n and v24.16b, v24.16b, v28.16b\n"                                       \
    "ushr v27.16b, v26.16b, #4\n and v26.16b, v26.16b, v28.16b\n"                                       \
    PACELINE_STEPS(24, 26, 16, 17, 18, 19, l) PACELINE_STEPS(25, 27, 20, 21, 22, 23, l)
#define PACELINE_LANE_Q8(l, at, x0, x1, x2, x3)                                                         \
    "ldp q24, q26, [%[w], #" #at "]\n" PACELINE_STEPS(24, 26, x0, x1, x2, x3, l)
#define PACELINE_LANES_Q8                                                                               \
    PACELINE_LANE_Q8(0, 0, 16, 17, 18, 19) PACELINE_LANE_Q8(1, 32, 16, 17, 18, 19)                      \
    PACELINE_LANE_Q8(2, 64, 16, 17, 18, 19) PACELINE_LANE_Q8(3, 96, 16, 17, 18, 19)                     \
    PACELINE_LANE_Q8(0, 128, 20, 21, 22, 23) PACELINE_LANE_Q8(1, 160, 20, 21, 22, 23)                   \
    PACELINE_LANE_Q8(2, 192, 20, 21, 22, 23) PACELINE_LANE_Q8(3, 224, 20, 21, 22, 23)
#define PACELINE_EACH_OF_4(OP) OP(0) OP(4) OP(1) OP(5) OP(2) OP(6) OP(3) OP(7)
#define PACELINE_START(a) "ldr q" #a ", [%[start]]\n"
#define PACELINE_STARTS_4 PACELINE_EACH_OF_4(PACELINE_START)
#define PACELINE_BEGIN_4 PACELINE_STARTS_4                                                              \
    "ldp q16, q20, [%[x]]\n ldp q17, q21, [%[x], #32]\n ldp q18, q22, [%[x], #64]\n ldp q19, q23, [%[x], #96]\n"
#define PACELINE_TO_FLOAT_4(a) "fsub v" #a ".4s, v" #a ".4s, v31.4s\n"
#define PACELINE_TIMES_4(a, s) "fmul v" #a ".4s, v" #a ".4s, v" #s ".4s\n"
#define PACELINE_SCALE_4                                                                                \
    "fcvtl v16.4s, v24.4h\n fcvtl2 v17.4s, v24.8h\n ldp q26, q27, [%[x], #128]\n"                       \
    PACELINE_EACH_OF_4(PACELINE_TO_FLOAT_4)                                                             \
    PACELINE_TIMES_4(0, 16) PACELINE_TIMES_4(4, 17) PACELINE_TIMES_4(1, 16) PACELINE_TIMES_4(5, 17)     \
    PACELINE_TIMES_4(2, 16) PACELINE_TIMES_4(6, 17) PACELINE_TIMES_4(3, 16) PACELINE_TIMES_4(7, 17)     \
    PACELINE_ADD(8, 0, 26, 0) PACELINE_ADD(12, 4, 26, 0) PACELINE_ADD(9, 1, 26, 1) PACELINE_ADD(13, 5, 26, 1) \
    PACELINE_ADD(10, 2, 26, 2) PACELINE_ADD(14, 6, 26, 2) PACELINE_ADD(11, 3, 26, 3) PACELINE_ADD(15, 7, 26, 3)
#define PACELINE_MINIMA_4                                                                               \
    PACELINE_ADD(8, 18, 27, 0) PACELINE_ADD(12, 19, 27, 0) PACELINE_ADD(9, 18, 27, 1) PACELINE_ADD(13, 19, 27, 1) \
    PACELINE_ADD(10, 18, 27, 2) PACELINE_ADD(14, 19, 27, 2) PACELINE_ADD(11, 18, 27, 3) PACELINE_ADD(15, 19, 27, 3)
#define PACELINE_ZERO_4                                                                                 \
    "ldr q31, [%[start]]\n"                                                                             \
    "movi v8.2d, #0\n movi v9.2d, #0\n movi v10.2d, #0\n movi v11.2d, #0\n"                             \
    "movi v12.2d, #0\n movi v13.2d, #0\n movi v14.2d, #0\n movi v15.2d, #0\n"
#define PACELINE_NEXT_4(bytes)                                                                          \
    "add %[w], %[w], #" #bytes "\n add %[x], %[x], #160\n subs %[blocks], %[blocks], #1\n b.ne 1b\n"
#define PACELINE_STORE_4                                                                                \
    "stp q8, q12, [%[out]]\n stp q9, q13, [%[out], #32]\n stp q10, q14, [%[out], #64]\n stp q11, q15, [%[out], #96]\n"

// out: [4 rows of activations, 8].
template <Format format> inline void tile_4(const uint8_t* w, const uint8_t* x, int64_t blocks, float* out) {
    if constexpr (format == Format::kQ4) {
        asm volatile("movi v28.16b, #15\n" PACELINE_ZERO_4
                     "1:\n" PACELINE_BEGIN_4 PACELINE_LANE_Q4(0, 0) PACELINE_LANE_Q4(1, 32) PACELINE_LANE_Q4(2, 64)
                     PACELINE_LANE_Q4(3, 96)
                     "ldr q24, [%[w], #128]\n ldr q25, [%[w], #144]\n"
                     "fcvtl v18.4s, v25.4h\n fcvtl2 v19.4s, v25.8h\n" PACELINE_SCALE_4 PACELINE_MINIMA_4
                     PACELINE_NEXT_4(160) PACELINE_STORE_4
                     : [w] "+r"(w), [x] "+r"(x), [blocks] "+r"(blocks)
                     : [start] "r"(kStart), [out] "r"(out)
                     : "memory", "cc", PACELINE_ALL_VECTORS);
    } else {
        asm volatile(PACELINE_ZERO_4
                     "1:\n" PACELINE_BEGIN_4 PACELINE_LANES_Q8
                     "ldr q24, [%[w], #256]\n" PACELINE_SCALE_4
                     PACELINE_NEXT_4(272) PACELINE_STORE_4
                     : [w] "+r"(w), [x] "+r"(x), [blocks] "+r"(blocks)
                     : [start] "r"(kStart), [out] "r"(out)
                     : "memory", "cc", PACELINE_ALL_VECTORS);
    }
}

// ---------------------------------------------------------------- the same for rows with one scale
// Rows with one scale: nothing but dot products, so what the next ones need is loaded while the ones before them run
// (in a burst at the start of a block the loads would hold up the vector ports). Ends with the next block's first
// values loaded; v30: the activations' scales.
#define PACELINE_X(a, at) "ldr q" #a ", [%[x], #" #at "]\n"
#define PACELINE_W(a, b, at) "ldp q" #a ", q" #b ", [%[w], #" #at "]\n"
#define PACELINE_BLOCK_I8                                                                               \
    "prfm pldl1keep, [%[next]]\n prfm pldl1keep, [%[next], #64]\n"                                      \
    PACELINE_X(20, 16) PACELINE_W(26, 27, 32) PACELINE_STEPS(24, 25, 16, 17, 18, 19, 0)                 \
    PACELINE_X(21, 48) PACELINE_W(28, 29, 64) PACELINE_STEPS(26, 27, 16, 17, 18, 19, 1)                 \
    PACELINE_X(22, 80) PACELINE_W(24, 25, 96) PACELINE_STEPS(28, 29, 16, 17, 18, 19, 2)                 \
    PACELINE_X(23, 112) PACELINE_W(26, 27, 128) PACELINE_STEPS(24, 25, 16, 17, 18, 19, 3)               \
    "prfm pldl1keep, [%[next], #128]\n prfm pldl1keep, [%[next], #192]\n add %[next], %[next], #256\n"   \
    PACELINE_X(16, 160) PACELINE_W(28, 29, 160) PACELINE_STEPS(26, 27, 20, 21, 22, 23, 0)               \
    PACELINE_X(17, 192) PACELINE_W(24, 25, 192) PACELINE_STEPS(28, 29, 20, 21, 22, 23, 1)               \
    PACELINE_X(18, 224) PACELINE_W(26, 27, 224) PACELINE_STEPS(24, 25, 20, 21, 22, 23, 2)               \
    PACELINE_X(19, 256) PACELINE_X(30, 128) PACELINE_W(24, 25, 256) PACELINE_STEPS(26, 27, 20, 21, 22, 23, 3)

// out: [4 rows of activations, 8]. Reads a bit behind the last block of w and x. `next`: what to ask for meanwhile, as
// long as a group.
inline void tile_4_int8(const uint8_t* w, const uint8_t* x, const uint8_t* next, int64_t blocks, float* out) {
    asm volatile(PACELINE_ZERO_4 PACELINE_STARTS_4
                 "ldr q16, [%[x]]\n ldr q17, [%[x], #32]\n ldr q18, [%[x], #64]\n ldr q19, [%[x], #96]\n"
                 "ldp q24, q25, [%[w]]\n"
                 "1:\n" PACELINE_BLOCK_I8 PACELINE_EACH_OF_4(PACELINE_TO_FLOAT_4)
                 PACELINE_ADD(8, 0, 30, 0) PACELINE_START(0) PACELINE_ADD(12, 4, 30, 0) PACELINE_START(4)
                 PACELINE_ADD(9, 1, 30, 1) PACELINE_START(1) PACELINE_ADD(13, 5, 30, 1) PACELINE_START(5)
                 PACELINE_ADD(10, 2, 30, 2) PACELINE_START(2) PACELINE_ADD(14, 6, 30, 2) PACELINE_START(6)
                 PACELINE_ADD(11, 3, 30, 3) PACELINE_START(3) PACELINE_ADD(15, 7, 30, 3) PACELINE_START(7)
                 PACELINE_NEXT_4(256)
                 "ldp q16, q17, [%[w]]\n"
                 PACELINE_TIMES_4(8, 16) PACELINE_TIMES_4(12, 17) PACELINE_TIMES_4(9, 16) PACELINE_TIMES_4(13, 17)
                 PACELINE_TIMES_4(10, 16) PACELINE_TIMES_4(14, 17) PACELINE_TIMES_4(11, 16) PACELINE_TIMES_4(15, 17)
                 PACELINE_STORE_4
                 : [w] "+r"(w), [x] "+r"(x), [next] "+r"(next), [blocks] "+r"(blocks)
                 : [start] "r"(kStart), [out] "r"(out)
                 : "memory", "cc", PACELINE_ALL_VECTORS);
}

// ---------------------------------------------------------------- many rows: weights unpacked once
// A panel holds a group's 4-bit blocks as the dot products want them: 256 bytes of values (lower four rows: first
// half of the columns, second half; then the upper four), and as floats the scales, what the start value of a sum
// comes to under each scale (negative), and the minima. It is made once for many tiles of activations.

constexpr int kPanelBlocks = 128;  // of a row, at most: a panel has to stay in the first-level cache
constexpr size_t kPanelBlock = 256 + 3 * 8 * sizeof(float);

inline void unpack_panel(const uint8_t* w, int blocks, uint8_t* panel) {
    const uint8x16_t mask = vdupq_n_u8(15);
    const float32x4_t start = vdupq_n_f32(-12582912.0f);
    for (int b = 0; b < blocks; b++, w += 160, panel += kPanelBlock) {
        for (int l = 0; l < 4; l++)
            for (int half = 0; half < 2; half++) {
                const uint8x16_t v = vld1q_u8(w + 32 * l + 16 * half);
                vst1q_u8(panel + 128 * half + 16 * l, vandq_u8(v, mask));
                vst1q_u8(panel + 128 * half + 64 + 16 * l, vshrq_n_u8(v, 4));
            }
        float* f = reinterpret_cast<float*>(panel + 256);
        for (int half = 0; half < 2; half++) {
            const uint16_t* h = reinterpret_cast<const uint16_t*>(w + 128 + 8 * half);
            const float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)));
            vst1q_f32(f + 4 * half, scale);
            vst1q_f32(f + 8 + 4 * half, vmulq_f32(scale, start));
            vst1q_f32(f + 16 + 4 * half, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 8))));
        }
    }
}

// v0-3, v4-7: integer sums of the lower and upper four rows; v8-15: outputs; v16-23: activations; v24-25: weights;
// v26-27: scaled sums; v28: scales; v29: minima; v30-31: scales and sums of the activations. The floats of one half
// are worked on while the dot products of the other run. fma(start + sum, scale, -start * scale) is sum * scale with
// one rounding, because start * scale is exact.
#define PACELINE_P(acc, w, x, l) "sdot v" #acc ".4s, v" #w ".16b, v" #x ".4b[" #l "]\n"
#define PACELINE_P4(a, b, c, d, w, x0, x1, x2, x3, l) \
    PACELINE_P(a, w, x0, l) PACELINE_P(b, w, x1, l) PACELINE_P(c, w, x2, l) PACELINE_P(d, w, x3, l)
#define PACELINE_F(acc, out, t, w, at, lane)                                        \
    "ldr q" #t ", [%[" #w "], #" #at "]\n fmla v" #t ".4s, v" #acc ".4s, v28.4s\n"  \
    "ldr q" #acc ", [%[start]]\n fmla v" #out ".4s, v" #t ".4s, v30.s[" #lane "]\n"
#define PACELINE_M(out, lane) "fmla v" #out ".4s, v29.4s, v31.s[" #lane "]\n"
// The lower half's dot products and, piece by piece, the floats F0 .. F5 of another half.
#define PACELINE_LOWER(F0, F1, F2, F3, F4, F5)                                                                  \
    "ldr q20, [%[x], #16]\n ldr q21, [%[x], #48]\n ldr q22, [%[x], #80]\n ldr q23, [%[x], #112]\n"               \
    "ldp q24, q25, [%[w]]\n" PACELINE_P4(0, 1, 2, 3, 24, 16, 17, 18, 19, 0) F0                                   \
    PACELINE_P4(0, 1, 2, 3, 25, 16, 17, 18, 19, 1)                                                                \
    "ldp q24, q25, [%[w], #32]\n" PACELINE_P4(0, 1, 2, 3, 24, 16, 17, 18, 19, 2) F1                              \
    PACELINE_P4(0, 1, 2, 3, 25, 16, 17, 18, 19, 3) F2                                                             \
    "ldp q24, q25, [%[w], #64]\n" PACELINE_P4(0, 1, 2, 3, 24, 20, 21, 22, 23, 0) F3                              \
    PACELINE_P4(0, 1, 2, 3, 25, 20, 21, 22, 23, 1) F4                                                             \
    "ldp q24, q25, [%[w], #96]\n" PACELINE_P4(0, 1, 2, 3, 24, 20, 21, 22, 23, 2)                                 \
    PACELINE_P4(0, 1, 2, 3, 25, 20, 21, 22, 23, 3) F5
#define PACELINE_FLOATS_LOWER_0 "ldr q28, [%[w], #256]\n ldr q29, [%[w], #320]\n"
#define PACELINE_UPPER                                                                                          \
    "ldp q24, q25, [%[w], #128]\n" PACELINE_P4(4, 5, 6, 7, 24, 16, 17, 18, 19, 0) PACELINE_FLOATS_LOWER_0        \
    PACELINE_P4(4, 5, 6, 7, 25, 16, 17, 18, 19, 1) PACELINE_F(0, 8, 26, w, 288, 0)                                \
    "ldp q24, q25, [%[w], #160]\n" PACELINE_P4(4, 5, 6, 7, 24, 16, 17, 18, 19, 2) PACELINE_F(1, 9, 27, w, 288, 1) \
    PACELINE_P4(4, 5, 6, 7, 25, 16, 17, 18, 19, 3)                                                                \
    "ldr q16, [%[x], #160]\n ldr q17, [%[x], #192]\n ldr q18, [%[x], #224]\n ldr q19, [%[x], #256]\n"            \
    "ldp q24, q25, [%[w], #192]\n" PACELINE_P4(4, 5, 6, 7, 24, 20, 21, 22, 23, 0) PACELINE_F(2, 10, 26, w, 288, 2) \
    PACELINE_P4(4, 5, 6, 7, 25, 20, 21, 22, 23, 1) PACELINE_F(3, 11, 27, w, 288, 3)                               \
    "ldp q24, q25, [%[w], #224]\n" PACELINE_P4(4, 5, 6, 7, 24, 20, 21, 22, 23, 2) PACELINE_M(8, 0) PACELINE_M(9, 1) \
    PACELINE_P4(4, 5, 6, 7, 25, 20, 21, 22, 23, 3) PACELINE_M(10, 2) PACELINE_M(11, 3)
#define PACELINE_U0 "ldr q28, [%[old], #272]\n ldr q29, [%[old], #336]\n"
#define PACELINE_U1 PACELINE_F(4, 12, 26, old, 304, 0)
#define PACELINE_U2 PACELINE_F(5, 13, 27, old, 304, 1)
#define PACELINE_U3 PACELINE_F(6, 14, 26, old, 304, 2)
#define PACELINE_U4 PACELINE_F(7, 15, 27, old, 304, 3)
#define PACELINE_U5 PACELINE_M(12, 0) PACELINE_M(13, 1) PACELINE_M(14, 2) PACELINE_M(15, 3)

// out: [4 rows of activations, 8]. Reads up to 128 bytes behind the last block of x.
inline void tile_panel(const uint8_t* w, const uint8_t* x, int64_t blocks, float* out) {
    const uint8_t* old = w;
    asm volatile(
        "movi v8.2d, #0\n movi v9.2d, #0\n movi v10.2d, #0\n movi v11.2d, #0\n"
        "movi v12.2d, #0\n movi v13.2d, #0\n movi v14.2d, #0\n movi v15.2d, #0\n"
        "ldr q0, [%[start]]\n ldr q1, [%[start]]\n ldr q2, [%[start]]\n ldr q3, [%[start]]\n"
        "ldr q4, [%[start]]\n ldr q5, [%[start]]\n ldr q6, [%[start]]\n ldr q7, [%[start]]\n"
        "ldr q16, [%[x]]\n ldr q17, [%[x], #32]\n ldr q18, [%[x], #64]\n ldr q19, [%[x], #96]\n"
        "ldp q30, q31, [%[x], #128]\n"
        PACELINE_LOWER("", "", "", "", "", "")
        "1:\n" PACELINE_UPPER
        "mov %[old], %[w]\n add %[w], %[w], #352\n add %[x], %[x], #160\n subs %[blocks], %[blocks], #1\n b.eq 2f\n"
        PACELINE_LOWER(PACELINE_U0, PACELINE_U1, PACELINE_U2, PACELINE_U3, PACELINE_U4, PACELINE_U5)
        "ldp q30, q31, [%[x], #128]\n b 1b\n"
        "2:\n" PACELINE_U0 PACELINE_U1 PACELINE_U2 PACELINE_U3 PACELINE_U4 PACELINE_U5
        "stp q8, q12, [%[out]]\n stp q9, q13, [%[out], #32]\n stp q10, q14, [%[out], #64]\n stp q11, q15, [%[out], #96]\n"
        : [w] "+r"(w), [x] "+r"(x), [old] "+r"(old), [blocks] "+r"(blocks)
        : [start] "r"(kStart), [out] "r"(out)
        : "memory", "cc", PACELINE_ALL_VECTORS);
}

}  // namespace
}  // namespace paceline

#endif
