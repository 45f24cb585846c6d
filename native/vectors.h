// Vectors of floats and the 8-row dot product, for the instruction set this file is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define PACELINE_NEON 1
#include <arm_neon.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PACELINE_AVX2 1
#include <immintrin.h>
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define PACELINE_VNNI 1  // a V stays eight wide: a wider sum would be another sum. Lanes that are never summed may be more
#endif
#endif

namespace paceline {
namespace {

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 0) {
        const float value = std::ldexp(float(mantissa), -24);
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline uint16_t float_to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return uint16_t(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude < 0x38800000) {  // subnormal half: let the float unit round
        float scaled;
        std::memcpy(&scaled, &magnitude, 4);
        return uint16_t(sign | uint16_t(std::nearbyint(scaled * 16777216.0f)));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
}

#if PACELINE_NEON

struct V {
    static constexpr int width = 4;
    float32x4_t v;
    static V load(const float* p) { return {vld1q_f32(p)}; }
    static V load_half(const uint16_t* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))}; }
    static V set(float x) { return {vdupq_n_f32(x)}; }
    void store(float* p) const { vst1q_f32(p, v); }
    void store_half(uint16_t* p) const { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
    float max_lane() const { return vmaxvq_f32(v); }
    float sum() const { return vaddvq_f32(v); }  // (0 + 1) + (2 + 3)
};
// The sums of four vectors, each as sum() has it.
inline void store_sums(V a, V b, V c, V d, float* out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a.v, b.v), vpaddq_f32(c.v, d.v)));
}
template <int lane> inline V fma_lane(V a, const float* four, V c) {  // a * four[lane] + c
    return {vfmaq_laneq_f32(c.v, a.v, vld1q_f32(four), lane)};
}
inline V operator+(V a, V b) { return {vaddq_f32(a.v, b.v)}; }
inline V operator-(V a, V b) { return {vsubq_f32(a.v, b.v)}; }
inline V operator*(V a, V b) { return {vmulq_f32(a.v, b.v)}; }
inline V operator/(V a, V b) { return {vdivq_f32(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {vfmaq_f32(c.v, a.v, b.v)}; }  // a * b + c
inline V max(V a, V b) { return {vmaxq_f32(a.v, b.v)}; }
inline V min(V a, V b) { return {vminq_f32(a.v, b.v)}; }
inline V abs(V a) { return {vabsq_f32(a.v)}; }
inline V round(V a) { return {vrndnq_f32(a.v)}; }
inline V zero_below(V a, V limit, V x) {  // a < limit ? 0 : x
    return {vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a.v, limit.v), vreinterpretq_u32_f32(x.v)))};
}
template <int n> inline V exchanged(V a) {  // lanes n apart change places
    static_assert(n == 1 || n == 2);
    if constexpr (n == 1) return {vrev64q_f32(a.v)};
    else return {vextq_f32(a.v, a.v, 2)};
}

#elif PACELINE_AVX2

struct V {
    static constexpr int width = 8;
    __m256 v;
    static V load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static V load_half(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static V set(float x) { return {_mm256_set1_ps(x)}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store_half(uint16_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    float max_lane() const {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
    }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
    }
};
inline V operator+(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.v, b.v)}; }
inline V abs(V a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline V round(V a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
template <int n> inline V exchanged(V a) {
    static_assert(n == 1 || n == 2 || n == 4);
    if constexpr (n == 1) return {_mm256_permute_ps(a.v, 0xb1)};
    else if constexpr (n == 2) return {_mm256_permute_ps(a.v, 0x4e)};
    else return {_mm256_permute2f128_ps(a.v, a.v, 1)};
}
inline V zero_below(V a, V limit, V x) { return {_mm256_and_ps(_mm256_cmp_ps(a.v, limit.v, _CMP_GE_OQ), x.v)}; }
// Two vectors' nearest whole numbers in 16 bits: a's first four, b's, a's last four, b's.
inline __m256i rounded_halves(V a, V b) { return _mm256_packs_epi32(_mm256_cvtps_epi32(a.v), _mm256_cvtps_epi32(b.v)); }

#else

struct V {
    static constexpr int width = 4;
    float v[4];
    template <class F> static V each(F f) { return {{f(0), f(1), f(2), f(3)}}; }
    static V load(const float* p) { return each([&](int i) { return p[i]; }); }
    static V load_half(const uint16_t* p) { return each([&](int i) { return half_to_float(p[i]); }); }
    static V set(float x) { return {{x, x, x, x}}; }
    void store(float* p) const { std::memcpy(p, v, 16); }
    void store_half(uint16_t* p) const { for (int i = 0; i < 4; i++) p[i] = float_to_half(v[i]); }
    float max_lane() const { return std::fmax(std::fmax(v[0], v[1]), std::fmax(v[2], v[3])); }
    float sum() const { return (v[0] + v[1]) + (v[2] + v[3]); }
};
inline V operator+(V a, V b) { return V::each([&](int i) { return a.v[i] + b.v[i]; }); }
inline V operator-(V a, V b) { return V::each([&](int i) { return a.v[i] - b.v[i]; }); }
inline V operator*(V a, V b) { return V::each([&](int i) { return a.v[i] * b.v[i]; }); }
inline V operator/(V a, V b) { return V::each([&](int i) { return a.v[i] / b.v[i]; }); }
inline V fma(V a, V b, V c) { return V::each([&](int i) { return std::fmaf(a.v[i], b.v[i], c.v[i]); }); }
inline V max(V a, V b) { return V::each([&](int i) { return std::fmax(a.v[i], b.v[i]); }); }
inline V min(V a, V b) { return V::each([&](int i) { return std::fmin(a.v[i], b.v[i]); }); }
inline V abs(V a) { return V::each([&](int i) { return std::fabs(a.v[i]); }); }
inline V round(V a) { return V::each([&](int i) { return std::nearbyint(a.v[i]); }); }
template <int n> inline V exchanged(V a) { return V::each([&](int i) { return a.v[i ^ n]; }); }
inline V zero_below(V a, V limit, V x) { return V::each([&](int i) { return a.v[i] >= limit.v[i] ? x.v[i] : 0.0f; }); }

#endif

#if !PACELINE_NEON
inline void store_sums(V a, V b, V c, V d, float* out) {
    out[0] = a.sum();
    out[1] = b.sum();
    out[2] = c.sum();
    out[3] = d.sum();
}
template <int lane> inline V fma_lane(V a, const float* four, V c) { return fma(a, V::set(four[lane]), c); }
#endif

// Added to a float below 2^22 in size, it leaves the nearest whole number in the low bits, and a whole number added to
// its bits is a float plus this: conversions cost four times an addition on some cores.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4b400000;

// a * 2^n for the n that n_plus_magic has in its low bits; the result is normal, or exactly 0 for a = 1 and n = -127.
inline V times_power(V a, V n_plus_magic) {
#if PACELINE_NEON
    return {vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v), vshlq_n_s32(vreinterpretq_s32_f32(n_plus_magic.v), 23)))};
#elif PACELINE_AVX2
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v),
                                                 _mm256_slli_epi32(_mm256_castps_si256(n_plus_magic.v), 23)))};
#else
    return V::each([&](int i) {
        uint32_t bits, shift;
        std::memcpy(&bits, a.v + i, 4);
        std::memcpy(&shift, n_plus_magic.v + i, 4);
        bits += shift << 23;
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    });
#endif
}

// e^x to about 2 ulp for x <= 88; 0 below -87, so that what is masked with -inf weighs exactly nothing.
inline V exp(V x) {
    const V clipped = min(max(x, V::set(-87.0f)), V::set(88.0f));
    const V shifted = clipped * V::set(1.44269504f) + V::set(kMagic), n = shifted - V::set(kMagic);
    V r = fma(n, V::set(-0.693359375f), clipped);
    r = fma(n, V::set(2.12194440e-4f), r);
    V p = V::set(1.9875691500e-4f);
    p = fma(p, r, V::set(1.3981999507e-3f));
    p = fma(p, r, V::set(8.3334519073e-3f));
    p = fma(p, r, V::set(4.1665795894e-2f));
    p = fma(p, r, V::set(1.6666665459e-1f));
    p = fma(p, r, V::set(5.0000001201e-1f));
    p = fma(p, r * r, r) + V::set(1.0f);
    return zero_below(x, V::set(-87.0f), times_power(p, shifted));
}

inline float exp(float x) {
    float lanes[V::width];
    exp(V::set(x)).store(lanes);
    return lanes[0];
}

}  // namespace
}  // namespace paceline
