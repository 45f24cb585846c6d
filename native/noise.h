// The noise of sampling: Philox4x32-10 keyed by (seed, position, token), and standard Gumbel noise made of its bits.
// Bits are the same in every implementation; the floats are too wherever this file runs: logarithms are written out
// here in double precision, so no mathematics library has a say.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace paceline {

typedef uint32_t Words __attribute__((vector_size(16)));

constexpr uint32_t kQuad = 4;  // tokens that share one evaluation of the generator

constexpr double kGumbelMin = -2.8116, kGumbelMax = 22.8740;  // of all 2^32 inputs, rounded outwards

inline Words splat(uint32_t x) { return Words{x, x, x, x}; }

// The halves of each product x[i] * by.
inline void multiply(Words x, uint32_t by, Words& high, Words& low) {
#if defined(__aarch64__)
    const uint32x4_t all = (uint32x4_t)x;
    const uint32x4_t a = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(all), by));
    const uint32x4_t b = vreinterpretq_u32_u64(vmull_high_n_u32(all, by));
    high = (Words)vuzp2q_u32(a, b);
    low = (Words)vuzp1q_u32(a, b);
#elif defined(__SSE2__)
    const __m128i all = (__m128i)x, factor = _mm_set1_epi32(int(by));
    const __m128i even = _mm_mul_epu32(all, factor), odd = _mm_mul_epu32(_mm_srli_epi64(all, 32), factor);
    const __m128i mask = _mm_set_epi32(0, -1, 0, -1);
    low = (Words)_mm_or_si128(_mm_and_si128(even, mask), _mm_slli_epi64(odd, 32));
    high = (Words)_mm_or_si128(_mm_srli_epi64(even, 32), _mm_andnot_si128(mask, odd));
#else
    for (int i = 0; i < 4; i++) {
        const uint64_t product = uint64_t(x[i]) * by;
        high[i] = uint32_t(product >> 32);
        low[i] = uint32_t(product);
    }
#endif
}

// Target noise (purpose 0) at one position of one sample.
class Noise {
  public:
    Noise(uint64_t seed, int64_t position) : position_(uint32_t(position)) {
        for (uint32_t r = 0; r < 10; r++) {
            keys_[r][0] = uint32_t(seed) + r * 0x9E3779B9u;
            keys_[r][1] = uint32_t(seed >> 32) + r * 0xBB67AE85u;
        }
    }

    uint32_t bits(uint32_t token) const {
        uint32_t w0 = token >> 2, w1 = position_, w2 = 0, w3 = 0;
        for (const auto& key : keys_) {
            const uint64_t a = uint64_t(w0) * kMultiplier0, b = uint64_t(w2) * kMultiplier1;
            w0 = uint32_t(b >> 32) ^ w1 ^ key[0];
            w1 = uint32_t(b);
            w2 = uint32_t(a >> 32) ^ w3 ^ key[1];
            w3 = uint32_t(a);
        }
        const uint32_t words[4] = {w0, w1, w2, w3};
        return words[token & 3];
    }

    // Bits of the tokens of 4 N quads: out[n][j][q] belongs to token kQuad * quads[4 * n + q] + j.
    template <size_t N> void bits(const uint32_t* quads, Words (*out)[4]) const {
        Words w0[N], w1[N], w2[N], w3[N];
        // Counter words 1 to 3 are the same for all tokens, so half of the first two rounds is done once.
        const uint32_t first = position_ ^ keys_[0][0];
        const uint64_t product = uint64_t(first) * kMultiplier0;
        const uint32_t fixed_high = uint32_t(product >> 32) ^ keys_[1][1], fixed_low = uint32_t(product);
        for (size_t n = 0; n < N; n++) {
            Words high, low;
            std::memcpy(&low, quads + 4 * n, sizeof low);
            multiply(low, kMultiplier0, high, low);
            w2[n] = low ^ fixed_high;
            multiply(high ^ keys_[0][1], kMultiplier1, high, low);
            w0[n] = high ^ keys_[1][0];
            w1[n] = low;
            w3[n] = splat(fixed_low);
        }
#pragma GCC unroll 8
        for (int r = 2; r < 10; r++)
#pragma GCC unroll 4
            for (size_t n = 0; n < N; n++) {
                Words high_a, low_a, high_b, low_b;
                multiply(w0[n], kMultiplier0, high_a, low_a);
                multiply(w2[n], kMultiplier1, high_b, low_b);
                w0[n] = high_b ^ (w1[n] ^ keys_[r][0]);
                w1[n] = low_b;
                w2[n] = high_a ^ (w3[n] ^ keys_[r][1]);
                w3[n] = low_a;
            }
        for (size_t n = 0; n < N; n++) {
            out[n][0] = w0[n];
            out[n][1] = w1[n];
            out[n][2] = w2[n];
            out[n][3] = w3[n];
        }
    }

  private:
    static constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
    uint32_t position_;
    uint32_t keys_[10][2];
};

// Natural logarithm of a normal positive number, to about 1e-12 of itself.
inline double natural_log(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    // x = m * 2^e with m between the roots of 1/2 and 2; then log m = 2 artanh((m - 1) / (m + 1)).
    const int64_t e = int64_t(bits - 0x3FE6A09E667F3BCDu) >> 52;
    bits -= uint64_t(e) << 52;
    double m;
    std::memcpy(&m, &bits, 8);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double series = 1.0 / 17.0;
    for (int odd = 15; odd >= 1; odd -= 2) series = series * z + 1.0 / odd;
    return double(e) * 0.69314718055994530942 + 2.0 * s * series;
}

// Standard Gumbel noise of 32 bits: larger bits, smaller noise.
inline float gumbel(uint32_t bits) {
    float v = float(bits);
    v += 0.5f;
    v *= 0x1p-32f;
    v = std::min(v, 1.0f - 0x1p-24f);
    // v is a multiple of 2^-33, so 1 - v is exact.
    const float e = float(-natural_log(1.0 - double(v)));
    return float(-natural_log(double(e)));
}

// An upper bound of gumbel(bits) at the price of a look into a table: at most 0.13 too high where noise is above 1.
class GumbelBound {
  public:
    GumbelBound() {
        for (uint32_t i = 0; i < 8; i++) table_[i] = gumbel(i) + 1e-4f;
        for (uint32_t e = 3; e < 32; e++)
            for (uint32_t i = 0; i < 8; i++) table_[e << 3 | i] = gumbel((8 | i) << (e - 3)) + 1e-4f;
    }

    float operator()(uint32_t bits) const {
        if (bits < 8) return table_[bits];
        const uint32_t e = 31u - uint32_t(__builtin_clz(bits));
        return table_[e << 3 | (bits >> (e - 3) & 7)];
    }

  private:
    std::array<float, 256> table_{};
};

}  // namespace paceline
