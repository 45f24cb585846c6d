// The two integer products of attention over int8 keys and values in AVX2. Pairs of 16-bit products are summed in 32 bits,
// where nothing overflows: the same integers as everywhere else.
#pragma once

#include "attention_int8_tile.h"

namespace paceline {
namespace {

// Sixteen bytes as 16-bit numbers.
inline __m256i widened_signed(const void* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline __m256i widened(const void* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))); }

// out[a * kTile + key] = (query . key) * scale of the key, for the fours of keys that [from, to) touches.
template <int NQ, int D, class Source>
__attribute__((noinline)) void int8_scores(const int8_t* const* q, const Source&, const Int8Tile& view, int size, float* out) {
    const int d = D ? D : size;
    alignas(32) int16_t queries[NQ][D ? D : kLargestHead];
    for (int a = 0; a < NQ; a++)
        for (int i = 0; i < d; i += 16)
            _mm256_store_si256(reinterpret_cast<__m256i*>(queries[a] + i), widened_signed(q[a] + i));
    for (int key = view.from / 4 * 4; key < view.to; key += 4) {
        __m256i sum[NQ][4];
        for (int b = 0; b < 4; b++) {
            const int8_t* k = static_cast<const int8_t*>(view.key[key + b]);
            for (int line = 0; line < d; line += 64) __builtin_prefetch(k + view.ahead[key / 4] + line);
            for (int a = 0; a < NQ; a++) sum[a][b] = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int i = 0; i < d; i += 16) {
                const __m256i x = widened_signed(k + i);
                for (int a = 0; a < NQ; a++)
                    sum[a][b] = _mm256_add_epi32(
                        sum[a][b], _mm256_madd_epi16(x, _mm256_load_si256(reinterpret_cast<const __m256i*>(queries[a] + i))));
            }
        }
        const __m128 scale = _mm_loadu_ps(view.key_scale + key);
        for (int a = 0; a < NQ; a++) {
            const __m256i fours = _mm256_hadd_epi32(_mm256_hadd_epi32(sum[a][0], sum[a][1]),
                                                    _mm256_hadd_epi32(sum[a][2], sum[a][3]));
            const __m128i dots = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
            _mm_storeu_ps(out + a * kTile + key, _mm_mul_ps(_mm_cvtepi32_ps(dots), scale));
        }
    }
}

// The weights of up to three queries, those of two keys in one lane. Values are 128 above themselves: `base`, which sums
// begin with, makes up for it.
template <int NQ> struct Weights {
    alignas(32) int32_t pairs[NQ][kTile / 2];  // from view.begin on
    int32_t base[NQ];

    // w[a * kTile + key] holds the weight in its low bits.
    void take(const float* w, int begin, int end) {
        const __m256i low = _mm256_set1_epi32(0xff), ones = _mm256_set1_epi16(1);
        for (int a = 0; a < NQ; a++) {
            __m256i sums = _mm256_setzero_si256();
            for (int key = begin; key < end; key += 16) {
                const auto eight = [&](int j) {
                    return _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(w + a * kTile + key + 8 * j)), low);
                };
                const __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(eight(0), eight(1)), 0xd8);
                _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[a] + (key - begin) / 2), all);
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(all, ones));
            }
            alignas(32) int32_t parts[8];
            _mm256_store_si256(reinterpret_cast<__m256i*>(parts), sums);
            int32_t total = 0;
            for (const int32_t part : parts) total += part;
            base[a] = -128 * total;
        }
    }
};

// The tokens of [view.begin, view.end) weighed, for the 16 * C features from i on.
template <int NQ, int C>
inline void weigh_features(const Weights<NQ>& weights, const Int8Tile& view, int i, const float* unit, float* const* out) {
    __m256i low[NQ][C], high[NQ][C];
    for (int a = 0; a < NQ; a++)
        for (int c = 0; c < C; c++) low[a][c] = high[a][c] = _mm256_set1_epi32(weights.base[a]);
    for (int token = view.begin; token < view.end; token += 2) {
        const uint8_t* first = static_cast<const uint8_t*>(view.value[token]) + i;
        const uint8_t* second = static_cast<const uint8_t*>(view.value[token + 1]) + i;
        if (i % 64 == 0) {
            __builtin_prefetch(first + view.ahead[token / 4]);
            __builtin_prefetch(second + view.ahead[token / 4]);
        }
        for (int c = 0; c < C; c++) {
            const __m256i x = widened(first + 16 * c), y = widened(second + 16 * c);
            const __m256i beside = _mm256_unpacklo_epi16(x, y), behind = _mm256_unpackhi_epi16(x, y);
            for (int a = 0; a < NQ; a++) {
                const __m256i weight = _mm256_set1_epi32(weights.pairs[a][(token - view.begin) / 2]);
                low[a][c] = _mm256_add_epi32(low[a][c], _mm256_madd_epi16(beside, weight));
                high[a][c] = _mm256_add_epi32(high[a][c], _mm256_madd_epi16(behind, weight));
            }
        }
    }
    for (int a = 0; a < NQ; a++)
        for (int c = 0; c < C; c++) {
            const __m256 scale = _mm256_set1_ps(unit[a]);
            const __m256i front = _mm256_permute2x128_si256(low[a][c], high[a][c], 0x20);
            const __m256i back = _mm256_permute2x128_si256(low[a][c], high[a][c], 0x31);
            _mm256_storeu_ps(out[a] + i + 16 * c, _mm256_mul_ps(_mm256_cvtepi32_ps(front), scale));
            _mm256_storeu_ps(out[a] + i + 16 * c + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(back), scale));
        }
}

// out[a] = unit[a] * sum of weight * value.
template <int NQ, class Source>
inline void int8_weigh(const Weights<NQ>& weights, const Source&, const Int8Tile& view, int d, const float* unit,
                       float* const* out) {
    int i = 0;
    for (; i + 32 <= d; i += 32) weigh_features<NQ, 2>(weights, view, i, unit, out);
    if (i < d) weigh_features<NQ, 1>(weights, view, i, unit, out);
}

}  // namespace
}  // namespace paceline
