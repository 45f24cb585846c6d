// Activations in int8 and their product with a packed matrix, for the instruction set this file is compiled for.
#pragma once

#include "dots.h"
#include "neon_tiles.h"
#include "spread.h"
#include "vectors.h"

namespace paceline {
namespace {

// ---------------------------------------------------------------- activations

// A block's nearest whole numbers; returns their sum.
inline int store_rounded(const V (&x)[kBlock / V::width], int8_t* out) {
#if PACELINE_NEON
    int32x4_t sums = vdupq_n_s32(0);
    for (int i = 0; i < kBlock; i += 16) {
        int16x8_t n[4];
        for (int j = 0; j < 4; j++) n[j] = vreinterpretq_s16_f32((x[i / 4 + j] + V::set(kMagic)).v);
        const int8x16_t rounded = vuzp1q_s8(vreinterpretq_s8_s16(vuzp1q_s16(n[0], n[1])),
                                            vreinterpretq_s8_s16(vuzp1q_s16(n[2], n[3])));
        vst1q_s8(out + i, rounded);
        sums = vdotq_s32(sums, rounded, vdupq_n_s8(1));
    }
    return vaddvq_s32(sums);
#elif PACELINE_AVX2
    const __m256i mixed = _mm256_packs_epi16(rounded_halves(x[0], x[1]), rounded_halves(x[2], x[3]));
    const __m256i rounded = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded);
#if PACELINE_VNNI
    const __m256i eight = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), rounded);
#else
    const __m256i eight = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), rounded), _mm256_set1_epi16(1));
#endif
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
    int total = 0;
    float rounded[kBlock];
    for (int i = 0; i < kBlock / V::width; i++) round(x[i]).store(rounded + i * V::width);
    for (int i = 0; i < kBlock; i++) {
        out[i] = int8_t(rounded[i]);
        total += out[i];
    }
    return total;
#endif
}

// Sums are of the ROUNDED values, times the scale. With the true sums the minima would not cancel the rounding errors
// that the 4-bit values, which are never negative, pick up all with the same sign: the error of a product doubles.
void quantise(const float* in, int count, const Quantised& out, int row, int first, bool spreads) {
    const int lane = row % kTileRows;
    uint8_t* tile = out.at(row, first);
    int32_t* starts = out.starts(row, first);
    for (int b = 0; b < count; b++, in += kBlock, tile += kTileBlock, starts += kTileRows) {
        V x[kBlock / V::width];
        for (int i = 0; i < kBlock / V::width; i++) x[i] = V::load(in + i * V::width);
        if (spreads) spread(x);
        int8_t* values = reinterpret_cast<int8_t*>(tile) + lane * kBlock;
        float* scales = reinterpret_cast<float*>(tile + kTileRows * kBlock);
        V top = V::set(0);
        for (const V& one : x) top = max(top, abs(one));
        const float largest = top.max_lane();
        const float scale = largest / 127.0f;
        const V inverse = V::set(largest > 1e-30f ? 127.0f / largest : 0.0f);  // of less it would overflow
        for (V& one : x) one = one * inverse;
        const int total = store_rounded(x, values);
        scales[lane] = scale;
        scales[kTileRows + lane] = scale * float(total);
        starts[lane] = -128 * total;
    }
}

// ---------------------------------------------------------------- rows of activations x groups of weights

// One group of weights times M rows. The floats of an output are added block after block: (sum * scale of
// the weights) * scale of the activations, then the minimum times the activations' sum, in this order for every M. A
// scale of the whole row comes last.
template <Format format, int M>
inline void multiply(const uint8_t* w, RowBlock x, int blocks, float (*out)[kLanes]) {
    Eight sum[M];
    for (int m = 0; m < M; m++) sum[m] = Eight::zero();
    [[maybe_unused]] const uint8_t* supers = w + size_t(blocks) * block_bytes(format);
    for (int b = 0; b < blocks; b++, w += block_bytes(format), x.next()) {
        Dots dots[M];
        if constexpr (M <= kWaitingRows) {
            for (size_t line = 0; line < block_bytes(format); line += 64) prefetch(w + kAhead + line);
        }
        if constexpr (format == Format::kQ4 || format == Format::kQ4K) {
            dot_q4<M>(w, x, dots);
            Eight scale, minimum;
            if constexpr (format == Format::kQ4) {
                scale = Eight::load_half(w + 128);
                minimum = Eight::load_half(w + 144);
            } else {
                // Products of an fp16 number and one of 6 bits: exact.
                const uint8_t* units = supers + size_t(b / kSuper) * 4 * kLanes;
                scale = Eight::load_half(units) * Eight::load_bytes(w + 128);
                minimum = Eight::load_half(units + 2 * kLanes) * Eight::load_bytes(w + 128 + kLanes);
            }
            for (int m = 0; m < M; m++) {
                sum[m] = fma(dots[m].floats() * scale, x.scale(m), sum[m]);
                sum[m] = fma(minimum, x.sum(m), sum[m]);
            }
        } else if constexpr (format == Format::kQ8F) {
            Dots upper[M];
            dot_half<M>(w, x, 0, dots);
            dot_half<M>(w + 128, x, 16, upper);
            const float* floats = reinterpret_cast<const float*>(w + 256);
            const Eight first = Eight::load(floats), second = Eight::load(floats + kLanes);
            const Eight minimum = Eight::load(floats + 2 * kLanes);
            for (int m = 0; m < M; m++) {
                sum[m] = fma(dots[m].floats() * first, x.scale(m), sum[m]);
                sum[m] = fma(upper[m].floats() * second, x.scale(m), sum[m]);
                sum[m] = fma(minimum, x.sum(m), sum[m]);
            }
        } else {
            dot_q8<M>(w, x, dots);
            if constexpr (format == Format::kI8) {
                for (int m = 0; m < M; m++) sum[m] = fma(dots[m].floats(), x.scale(m), sum[m]);
            } else {
                const Eight scale = Eight::load_half(w + 256);
                for (int m = 0; m < M; m++) sum[m] = fma(dots[m].floats() * scale, x.scale(m), sum[m]);
            }
        }
    }
    if constexpr (format == Format::kI8) {
        const Eight scale = Eight::load(reinterpret_cast<const float*>(w));
        for (int m = 0; m < M; m++) sum[m] = sum[m] * scale;
    }
    for (int m = 0; m < M; m++) sum[m].store(out[m]);
}

// The same for a number of rows that is known only now.
template <Format format, int M = kRowsAtOnce>
inline void multiply_rows(const uint8_t* w, const RowBlock& x, int rows, int blocks, float (*out)[kLanes]) {
    if constexpr (M > 1) {
        if (rows < M) return multiply_rows<format, M - 1>(w, x, rows, blocks, out);
    }
#if PACELINE_NEON
    if constexpr (M == kTileRows && format == Format::kI8) return tile_4_int8(w, x.tile, w, blocks, out[0]);
    else if constexpr (M == kTileRows && (format == Format::kQ4 || format == Format::kQ8)) return tile_4<format>(w, x.tile, blocks, out[0]);
    else
#endif
    multiply<format, M>(w, x, blocks, out);
}

#if PACELINE_VNNI
// multiply() and place() of two groups of 8 bits: a register of 64 bytes holds both.
template <Format format, int M>
inline void multiply_pair(const uint8_t* w, const uint8_t* other, RowBlock x, int blocks, float* y, int ldy, bool add) {
    Sixteen sum[M];
    for (int m = 0; m < M; m++) sum[m] = Sixteen::zero();
    for (int b = 0; b < blocks; b++, w += block_bytes(format), other += block_bytes(format), x.next()) {
        Sixteen dots[M];
        if constexpr (M <= kWaitingRows) {
            for (size_t line = 0; line < block_bytes(format); line += 64) {
                prefetch(w + kAhead + line);
                prefetch(other + kAhead + line);
            }
        }
        dot_q8_pair<M>(w, other, x, dots);
        if constexpr (format == Format::kI8) {
            for (int m = 0; m < M; m++) sum[m] = fma(dots[m], x.scale(m), sum[m]);
        } else {
            const Sixteen scale = Sixteen::load_half(w + 256, other + 256);
            for (int m = 0; m < M; m++) sum[m] = fma(dots[m] * scale, x.scale(m), sum[m]);
        }
    }
    if constexpr (format == Format::kI8) {
        const Sixteen scale = Sixteen::load(reinterpret_cast<const float*>(w), reinterpret_cast<const float*>(other));
        for (int m = 0; m < M; m++) sum[m] = sum[m] * scale;
    }
    for (int m = 0; m < M; m++) {
        float* out = y + size_t(m) * size_t(ldy);
        if (add) sum[m].v = _mm512_add_ps(_mm512_loadu_ps(out), sum[m].v);
        sum[m].store(out);
    }
}

template <Format format, int M = kMostPairRows>
inline void multiply_pair_rows(const uint8_t* w, const uint8_t* other, const RowBlock& x, int rows, int blocks, float* y, int ldy,
                           bool add) {
    if constexpr (M > 1) {
        if (rows < M) return multiply_pair_rows<format, M - 1>(w, other, x, rows, blocks, y, ldy, add);
    }
    multiply_pair<format, M>(w, other, x, blocks, y, ldy, add);
}

// A group and the next one, rows [from, to): all of them. Returns `to`.
template <Format format>
inline int multiply_pairs(const uint8_t* w, size_t group_bytes, const Quantised& x, int from, int to, float* y, int ldy, bool add) {
    for (int row = from, rows; row < to; row += rows) {
        rows = to - row <= kMostPairRows ? to - row : kPairRows;
        multiply_pair_rows<format>(w, w + group_bytes, RowBlock(x, row), rows, x.blocks, y + size_t(row) * size_t(ldy), ldy, add);
    }
    return to;
}
#endif

inline void place(const float (*from)[kLanes], int rows, float* y, int ldy, bool add) {
    for (int m = 0; m < rows; m++) {
        float* out = y + size_t(m) * size_t(ldy);
        const Eight value = Eight::load(from[m]);
        (add ? Eight::load(out) + value : value).store(out);
    }
}

#if PACELINE_NEON
constexpr int kPanelRows = 32;  // from here on it pays to unpack a group once

// Rows [from, to) but for the last few; returns the first that is left. While the last tile of rows passes over this
// group the next group is fetched: with more than one tile the processor's own guess of what comes next is wrong.
inline int multiply_int8(const uint8_t* w, size_t group_bytes, const Quantised& x, int from, int to, float* y, int ldy,
                         bool add) {
    alignas(16) float out[kTileRows][kLanes];
    const bool single = to - from <= kTileRows;
    int row = from;
    for (; row + kTileRows <= to; row += kTileRows) {
        const uint8_t* next = single ? w + 2048 : row + 2 * kTileRows > to ? w + group_bytes : w;
        tile_4_int8(w, x.at(row, 0), next, x.blocks, out[0]);
        place(out, kTileRows, y + size_t(row) * size_t(ldy), ldy, add);
    }
    return row;
}

// Rows [from, to) but for the last few; returns the first that is left.
template <Format format>
inline int multiply_eights(const uint8_t* w, const Quantised& x, int from, int to, float* y, int ldy, bool add) {
    alignas(16) float lower[8][4], upper[8][4];
    int row = from;
    for (; row + 8 <= to; row += 8) {
        tile_8<format>(w, x.at(row, 0), x.at(row + 4, 0), x.blocks, lower[0], 0);
        tile_8<format>(w + 16, x.at(row, 0), x.at(row + 4, 0), x.blocks, upper[0], 1);
        for (int k = 0; k < 8; k++) {
            float* at = y + size_t(row + k) * size_t(ldy);
            const Eight value = {vld1q_f32(lower[k]), vld1q_f32(upper[k])};
            (add ? Eight::load(at) + value : value).store(at);
        }
    }
    return row;
}

// Rows [from, to) but for the last few; returns the first that is left.
inline int multiply_panel(const uint8_t* w, const Quantised& x, int from, int to, float* y, int ldy, bool add) {
    alignas(64) uint8_t panel[kPanelBlocks * kPanelBlock];
    alignas(16) float out[kTileRows][kLanes];
    unpack_panel(w, x.blocks, panel);
    int row = from;
    for (; row + kTileRows <= to; row += kTileRows) {
        tile_panel(panel, x.at(row, 0), x.blocks, out[0]);
        place(out, kTileRows, y + size_t(row) * size_t(ldy), ldy, add);
    }
    return row;
}
#endif

template <Format format>
void multiply_groups(const Packed& w, const Quantised& x, int m, int first, int last, float* y, int ldy, bool add) {
    // Rows in chunks whose int8 values stay in the second-level cache while all groups pass over them.
    constexpr int kChunk = 128;
    const int blocks = x.blocks;
    alignas(16) float out[kRowsAtOnce][kLanes];
    for (int from = 0; from < m; from += kChunk) {
        const int to = m < from + kChunk ? m : from + kChunk;
        for (int g = first; g < last; g++) {
            const uint8_t* data = w.data + size_t(g) * w.group_bytes();
            float* target = y + size_t(g) * kLanes;
            int row = from;
#if PACELINE_VNNI
            if constexpr (format == Format::kI8 || format == Format::kQ8) {
                if (g + 1 < last) {
                    row = multiply_pairs<format>(data, w.group_bytes(), x, from, to, target, ldy, add);
                    g++;
                }
            }
#endif
#if PACELINE_NEON
            if (format == Format::kQ4 && to - from >= kPanelRows && blocks <= kPanelBlocks)
                row = multiply_panel(data, x, from, to, target, ldy, add);
            if (format == Format::kI8) row = multiply_int8(data, w.group_bytes(), x, from, to, target, ldy, add);
            if constexpr (format == Format::kQ4 || format == Format::kQ8)
                row = multiply_eights<format>(data, x, row, to, target, ldy, add);
#endif
            for (; row < to; row += kRowsAtOnce) {
                const int rows = to - row < kRowsAtOnce ? to - row : kRowsAtOnce;
                multiply_rows<format>(data, RowBlock(x, row), rows, blocks, out);
                place(out, rows, target + size_t(row) * size_t(ldy), ldy, add);
            }
        }
    }
}

void gemm(const Packed& w, const Quantised& x, int m, int first, int last, float* y, int ldy, bool add) {
    if (w.format == Format::kQ4) multiply_groups<Format::kQ4>(w, x, m, first, last, y, ldy, add);
    else if (w.format == Format::kQ8) multiply_groups<Format::kQ8>(w, x, m, first, last, y, ldy, add);
    else if (w.format == Format::kQ4K) multiply_groups<Format::kQ4K>(w, x, m, first, last, y, ldy, add);
    else if (w.format == Format::kQ8F) multiply_groups<Format::kQ8F>(w, x, m, first, last, y, ldy, add);
    else multiply_groups<Format::kI8>(w, x, m, first, last, y, ldy, add);
}

}  // namespace
}  // namespace paceline
