// Vectors of a head in int8, and the part of a tile of them that an attention kernel looks at.
#pragma once

#include <algorithm>

#include "spread.h"
#include "vectors.h"

namespace paceline {
namespace {

constexpr int kLargestHead = 256;
constexpr float kTiny = 1e-30f;  // scales below this stand for zeros; their inverse could overflow

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
#elif PACELINE_AVX2
        const auto level = [&](int j) { return min(max(V::load(x + i + j) * V::set(inverse), V::set(-127.0f)), V::set(127.0f)); };
        const __m256i halves = _mm256_permute4x64_epi64(rounded_halves(level(0), level(8)), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
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
    spread(x, d);
    const float scale = round_to_int8(x, d, values);
    const float positive = scale == 0.0f ? 1.0f : scale;  // all zeros: any scale will do but 0, which -inf must not meet
    std::memcpy(values + d, &positive, sizeof positive);
}

// A key's scale, its int8 values in `out`; x is overwritten.
inline float pack_key(float* x, int d, int8_t* out) {
    spread(x, d);
    return round_to_int8(x, d, out) / float(d & -d);  // as both sides of the products were spread
}

// A value's scale, its values 128 above themselves in `out`: udot takes bytes without a sign.
inline float pack_value(const float* x, int d, uint8_t* out) {
    const float scale = round_to_int8(x, d, reinterpret_cast<int8_t*>(out));
    for (int i = 0; i < d; i++) out[i] ^= 0x80;
    return scale;
}

// The part [from, to) of a tile that is looked at, in whole sixteens [begin, end). Tokens that are not there have the
// vectors of one that is, and scales of 0.
struct Int8Tile {
    int from, to, begin, end;
    const void* const* key;
    const void* const* value;
    const float* key_scale;
    const float* value_scale;
    const int64_t* ahead;

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

}  // namespace
}  // namespace paceline
