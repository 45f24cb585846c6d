// What the sampler computes with: vectors of four floats, the keys of scores, weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "sampler.h"
#include "scores.h"

namespace paceline {
namespace {

typedef int32_t Mask __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));

Floats splat(float x) { return Floats{x, x, x, x}; }

Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

bool any(Mask mask) {
    uint64_t halves[2];
    std::memcpy(halves, &mask, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

// Which lanes are set, as four bits.
uint32_t lanes(Mask mask) {
#if defined(__aarch64__)
    return vaddvq_u32((uint32x4_t)((Words)mask & Words{1, 2, 4, 8}));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_ps((__m128)mask));
#else
    return (mask[0] & 1u) | (mask[1] & 2u) | (mask[2] & 4u) | (mask[3] & 8u);
#endif
}

// Of every such four bits: the lanes that are set, ascending, and how many they are.
struct Lanes {
    Words lists[16] = {};
    uint32_t counts[16] = {};
    Lanes() {
        for (uint32_t bits = 0; bits < 16; bits++)
            for (uint32_t lane = 0; lane < 4; lane++)
                if (bits >> lane & 1) lists[bits][counts[bits]++] = lane;
    }
};
const Lanes kLanes;

// Of numbers; where one is NaN on NEON so is the result.
Floats larger(Floats a, Floats b) {
#if defined(__aarch64__)
    return (Floats)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return a > b ? a : b;
#endif
}

// The largest of each vector. Where a number among them is NaN, `good` loses a lane, or on NEON the result is NaN too.
Floats largest(Floats a, Floats b, Floats c, Floats d, Mask& good) {
#if defined(__aarch64__)
    (void)good;
    return (Floats)vpmaxq_f32(vpmaxq_f32((float32x4_t)a, (float32x4_t)b), vpmaxq_f32((float32x4_t)c, (float32x4_t)d));
#else
    good &= (a == a) & (b == b) & (c == c) & (d == d);
#if defined(__SSE2__)
    __m128 p = (__m128)a, q = (__m128)b, r = (__m128)c, s = (__m128)d;
    _MM_TRANSPOSE4_PS(p, q, r, s);
    return larger(larger((Floats)p, (Floats)q), larger((Floats)r, (Floats)s));
#else
    const auto one = [](Floats x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); };
    return Floats{one(a), one(b), one(c), one(d)};
#endif
#endif
}

// The larger the score, the smaller the key; of equal scores the lowest token has the smallest.
uint64_t key_of(float score, uint32_t token) {
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    return uint64_t(bits >> 31 ? bits : bits ^ 0x7FFFFFFFu) << 32 | token;
}

float score_of(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    bits = bits >> 31 ? bits : bits ^ 0x7FFFFFFFu;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

// a * b + c; fused where every machine of the kind can.
Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// x becomes e^x, for x <= 0, to about one unit in the last place; what is below -86 counts as -86, which is as good as
// nothing beside a weight of 1. Vectors advance together so that no step waits for the one before it.
template <int N> __attribute__((always_inline)) inline void exponential(Floats (&x)[N]) {
    Floats shifted[N], y[N];
    for (int i = 0; i < N; i++) {
        x[i] = larger(x[i], splat(-86.0f));
        shifted[i] = multiply_add(x[i], splat(1.44269504f), splat(12582912.0f));  // rounds to a whole number
    }
    for (int i = 0; i < N; i++) {
        const Floats n = shifted[i] - 12582912.0f;
        x[i] = multiply_add(n, splat(-0.693359375f), x[i]);
        x[i] = multiply_add(n, splat(2.12194440e-4f), x[i]);
    }
    for (int i = 0; i < N; i++) y[i] = multiply_add(x[i], splat(1.393378354e-3f), splat(8.363269443e-3f));
    for (int i = 0; i < N; i++) y[i] = multiply_add(y[i], x[i], splat(4.166646371e-2f));
    for (int i = 0; i < N; i++) y[i] = multiply_add(y[i], x[i], splat(1.666657644e-1f));
    for (int i = 0; i < N; i++) y[i] = multiply_add(y[i], x[i], splat(0.5f));
    for (int i = 0; i < N; i++) y[i] = multiply_add(y[i] * x[i], x[i], x[i]);
    // The whole number stands in the low bits of `shifted`: moved up, it is what the exponent lacks.
    for (int i = 0; i < N; i++) x[i] = (Floats)((Words)(y[i] + 1.0f) + ((Words)shifted[i] << 23));
}

void add(Floats x, Doubles& low, Doubles& high) {
#if defined(__aarch64__)
    low += (Doubles)vcvt_f64_f32(vget_low_f32((float32x4_t)x));
    high += (Doubles)vcvt_high_f64_f32((float32x4_t)x);
#elif defined(__SSE2__)
    low += (Doubles)_mm_cvtps_pd((__m128)x);
    high += (Doubles)_mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x));
#else
    low += Doubles{double(x[0]), double(x[1])};
    high += Doubles{double(x[2]), double(x[3])};
#endif
}

}  // namespace
}  // namespace paceline
