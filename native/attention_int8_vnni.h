// The two integer products of attention over int8 keys and values in AVX-512 with VNNI: four bytes without a sign times
// four with one, summed onto 32 bits, where nothing overflows: the same integers as everywhere else.
#pragma once

#include "attention_int8_tile.h"

namespace paceline {
namespace {

constexpr int kGroup = 16;  // keys side by side, and bytes of a vector that are taken at a time

// Keys with four features of sixteen keys side by side, so that a score is a lane: its products need no sum across lanes.
// Every key is 128 above itself: what a sum begins with makes up for it.
struct InterleavedKeys {
    alignas(64) uint8_t keys[kTile * kLargestHead];  // [groups from view.begin on][d / 4][kGroup][4]

    InterleavedKeys(const Int8Tile& view, int d) {
        for (int key = view.begin; key < view.end; key += kGroup) {
            const auto piece = [&](int b, int i) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(view.key[key + b]) + i));
            };
            for (int b = 0; b < kGroup; b++)
                for (int line = 0; line < d; line += 64)
                    __builtin_prefetch(static_cast<const int8_t*>(view.key[key + b]) + view.ahead[(key + b) / 4] + line);
            __m512i* out = reinterpret_cast<__m512i*>(keys + (key - view.begin) * d);
            for (int i = 0; i < d; i += kGroup, out += 4) {
                __m512i four[4];  // keys j, 4 + j, 8 + j and 12 + j, whose lanes come out in order
                for (int j = 0; j < 4; j++) {
                    four[j] = _mm512_castsi128_si512(piece(j, i));
                    four[j] = _mm512_inserti32x4(four[j], piece(4 + j, i), 1);
                    four[j] = _mm512_inserti32x4(four[j], piece(8 + j, i), 2);
                    four[j] = _mm512_inserti32x4(four[j], piece(12 + j, i), 3);
                    four[j] = _mm512_xor_si512(four[j], _mm512_set1_epi8(-128));
                }
                const __m512i low = _mm512_unpacklo_epi32(four[0], four[1]), high = _mm512_unpackhi_epi32(four[0], four[1]);
                const __m512i lower = _mm512_unpacklo_epi32(four[2], four[3]), upper = _mm512_unpackhi_epi32(four[2], four[3]);
                _mm512_store_si512(out, _mm512_unpacklo_epi64(low, lower));
                _mm512_store_si512(out + 1, _mm512_unpackhi_epi64(low, lower));
                _mm512_store_si512(out + 2, _mm512_unpacklo_epi64(high, upper));
                _mm512_store_si512(out + 3, _mm512_unpackhi_epi64(high, upper));
            }
        }
    }
};

// -128 times the sum of a query's values.
inline int32_t start_of(const int8_t* q, int d) {
    __m128i sums = _mm_setzero_si128();
    for (int i = 0; i < d; i += 16)
        sums = _mm_dpbusd_epi32(sums, _mm_set1_epi8(1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i)));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return -128 * _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
}

// Scores of `count` sixteens of keys: sums that wait for one another need company.
template <int NQ, int D, int count>
inline void score_groups(const int8_t* const* q, const int32_t* starts, const uint8_t* keys, const float* scale, int size,
                         float* out) {
    const int d = D ? D : size;
    __m512i sums[NQ][count];
    for (int a = 0; a < NQ; a++)
        for (int g = 0; g < count; g++) sums[a][g] = _mm512_set1_epi32(starts[a]);
    for (int i = 0; i < d; i += 4) {
        __m512i four[count];
        for (int g = 0; g < count; g++) four[g] = _mm512_load_si512(keys + g * kGroup * d + kGroup * i);
        for (int a = 0; a < NQ; a++) {
            int32_t bytes;
            std::memcpy(&bytes, q[a] + i, 4);
            const __m512i query = _mm512_set1_epi32(bytes);
            for (int g = 0; g < count; g++) sums[a][g] = _mm512_dpbusd_epi32(sums[a][g], four[g], query);
        }
    }
    for (int a = 0; a < NQ; a++)
        for (int g = 0; g < count; g++)
            _mm512_storeu_ps(out + a * kTile + g * kGroup,
                             _mm512_mul_ps(_mm512_cvtepi32_ps(sums[a][g]), _mm512_loadu_ps(scale + g * kGroup)));
}

// out[a * kTile + key] = (query . key) * scale of the key, for the keys of [view.begin, view.end).
template <int NQ, int D>
inline void int8_scores(const int8_t* const* q, const InterleavedKeys& keys, const Int8Tile& view, int size, float* out) {
    const int d = D ? D : size;
    int32_t starts[NQ];
    for (int a = 0; a < NQ; a++) starts[a] = start_of(q[a], d);
    int key = view.begin;
    const auto from = [&](int at) { return keys.keys + (at - view.begin) * d; };
    for (; key + 2 * kGroup <= view.end; key += 2 * kGroup)
        score_groups<NQ, D, 2>(q, starts, from(key), view.key_scale + key, d, out + key);
    if (key < view.end) score_groups<NQ, D, 1>(q, starts, from(key), view.key_scale + key, d, out + key);
}

// The weights of up to three queries as bytes, those of four keys in one lane.
template <int NQ> struct Weights {
    alignas(16) uint8_t bytes[NQ][kTile];  // from view.begin on

    // w[a * kTile + key] holds the weight in its low bits.
    void take(const float* w, int begin, int end) {
        for (int a = 0; a < NQ; a++)
            for (int key = begin; key < end; key += kGroup)
                _mm_store_si128(reinterpret_cast<__m128i*>(bytes[a] + key - begin),
                                _mm512_cvtepi32_epi8(_mm512_castps_si512(_mm512_loadu_ps(w + a * kTile + key))));
    }
    int32_t four(int a, int token) const {
        int32_t lane;
        std::memcpy(&lane, bytes[a] + token, 4);
        return lane;
    }
};

// out[a] = unit[a] * sum of weight * value. Values are kept 128 above themselves.
template <int NQ, class Source>
inline void int8_weigh(const Weights<NQ>& weights, const Source&, const Int8Tile& view, int d, const float* unit,
                       float* const* out) {
    for (int i = 0; i < d; i += 64) {
        const int width = std::min(64, d - i);
        const __mmask64 there = ~__mmask64(0) >> (64 - width);
        __m512i sums[NQ][4];
        for (int a = 0; a < NQ; a++)
            for (int j = 0; j < 4; j++) sums[a][j] = _mm512_setzero_si512();
        for (int token = view.begin; token < view.end; token += 4) {
            __m512i values[4];
            for (int b = 0; b < 4; b++) {
                const uint8_t* value = static_cast<const uint8_t*>(view.value[token + b]) + i;
                __builtin_prefetch(value + view.ahead[token / 4]);
                values[b] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, value), _mm512_set1_epi8(-128));
            }
            const __m512i low = _mm512_unpacklo_epi8(values[0], values[1]), high = _mm512_unpackhi_epi8(values[0], values[1]);
            const __m512i lower = _mm512_unpacklo_epi8(values[2], values[3]), upper = _mm512_unpackhi_epi8(values[2], values[3]);
            const __m512i fours[4] = {_mm512_unpacklo_epi16(low, lower), _mm512_unpackhi_epi16(low, lower),
                                      _mm512_unpacklo_epi16(high, upper), _mm512_unpackhi_epi16(high, upper)};
            for (int a = 0; a < NQ; a++) {
                const __m512i weight = _mm512_set1_epi32(weights.four(a, token - view.begin));
                for (int j = 0; j < 4; j++) sums[a][j] = _mm512_dpbusd_epi32(sums[a][j], weight, fours[j]);
            }
        }
        for (int a = 0; a < NQ; a++) {
            // Lane l of sums j: features 16 l + 4 j to 16 l + 4 j + 3.
            const __m512i front = _mm512_shuffle_i32x4(sums[a][0], sums[a][1], 0x44), rear = _mm512_shuffle_i32x4(sums[a][2], sums[a][3], 0x44);
            const __m512i after = _mm512_shuffle_i32x4(sums[a][0], sums[a][1], 0xee), last = _mm512_shuffle_i32x4(sums[a][2], sums[a][3], 0xee);
            const __m512i lanes[4] = {_mm512_shuffle_i32x4(front, rear, 0x88), _mm512_shuffle_i32x4(front, rear, 0xdd),
                                      _mm512_shuffle_i32x4(after, last, 0x88), _mm512_shuffle_i32x4(after, last, 0xdd)};
            for (int l = 0; 16 * l < width; l++)
                _mm512_storeu_ps(out[a] + i + 16 * l, _mm512_mul_ps(_mm512_cvtepi32_ps(lanes[l]), _mm512_set1_ps(unit[a])));
        }
    }
}

}  // namespace
}  // namespace paceline
