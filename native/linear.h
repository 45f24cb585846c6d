// Activations in int8 and their product with a packed matrix, for the instruction set this file is compiled for.
#pragma once

#include "neon_tiles.h"
#include "spread.h"
#include "vectors.h"

namespace paceline {
namespace {

// ---------------------------------------------------------------- activations

// Sums are of the ROUNDED values, times the scale. With the true sums the minima would not cancel the rounding errors
// that the 4-bit values, which are never negative, pick up all with the same sign: the error of a product doubles.
void quantise(const float* in, int count, const Quantised& out, int row, int first, bool spreads) {
    const int lane = row % kTileRows;
    uint8_t* tile = out.at(row, first);
    alignas(64) float block[kBlock];
    for (int b = 0; b < count; b++, in += kBlock, tile += kTileBlock) {
        const float* x = in;
        if (spreads) {
            std::memcpy(block, in, sizeof block);
            spread(block, kBlock);
            x = block;
        }
        int8_t* values = reinterpret_cast<int8_t*>(tile) + lane * kBlock;
        float* scales = reinterpret_cast<float*>(tile + kTileRows * kBlock);
        V top = V::set(0);
        for (int i = 0; i < kBlock; i += V::width) top = max(top, abs(V::load(x + i)));
        const float largest = top.max_lane();
        const float scale = largest / 127.0f;
        const V inverse = V::set(largest > 0.0f ? 127.0f / largest : 0.0f);
        int total = 0;
#if PACELINE_NEON
        int32x4_t sums = vdupq_n_s32(0);
        for (int i = 0; i < kBlock; i += 16) {
            int16x8_t n[4];
            for (int j = 0; j < 4; j++)
                n[j] = vreinterpretq_s16_f32((V::load(x + i + 4 * j) * inverse + V::set(kMagic)).v);
            const int8x16_t rounded = vuzp1q_s8(vreinterpretq_s8_s16(vuzp1q_s16(n[0], n[1])),
                                                vreinterpretq_s8_s16(vuzp1q_s16(n[2], n[3])));
            vst1q_s8(values + i, rounded);
            sums = vdotq_s32(sums, rounded, vdupq_n_s8(1));
        }
        total = vaddvq_s32(sums);
#else
        float rounded[kBlock];
        for (int i = 0; i < kBlock; i += V::width) round(V::load(x + i) * inverse).store(rounded + i);
        for (int i = 0; i < kBlock; i++) {
            values[i] = int8_t(rounded[i]);
            total += values[i];
        }
#endif
        scales[lane] = scale;
        scales[kTileRows + lane] = scale * float(total);
    }
}

// ---------------------------------------------------------------- eight rows of weights at once

#if PACELINE_NEON

// Eight floats, one for each row of a group.
struct Eight {
    float32x4_t a, b;
    static Eight zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
    static Eight load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static Eight load_half(const uint8_t* p) {
        const uint16_t* h = reinterpret_cast<const uint16_t*>(p);
        return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h + 4)))};
    }
    static Eight load_bytes(const uint8_t* p) {
        const uint16x8_t wide = vmovl_u8(vld1_u8(p));
        return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
    }
    void store(float* p) const { vst1q_f32(p, a); vst1q_f32(p + 4, b); }
};
inline Eight operator+(Eight x, Eight y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline Eight operator*(Eight x, Eight y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline Eight fma(Eight x, float s, Eight z) { return {vfmaq_n_f32(z.a, x.a, s), vfmaq_n_f32(z.b, x.b, s)}; }

// Sums that start at the bits of 1.5 * 2^23: see neon_tiles.h.
struct Dots {
    int32x4_t a, b;
    static Dots zero() { return {vdupq_n_s32(kStart[0]), vdupq_n_s32(kStart[0])}; }
    Eight floats() const {
        const float32x4_t start = vreinterpretq_f32_s32(vdupq_n_s32(kStart[0]));
        return {vsubq_f32(vreinterpretq_f32_s32(a), start), vsubq_f32(vreinterpretq_f32_s32(b), start)};
    }
};

// Dot products of a block (32 columns x 8 rows) with the same block of M activation rows.
template <int M> inline void dot_q4(const uint8_t* w, const int8_t* x, Dots* out) {
    const uint8x16_t mask = vdupq_n_u8(15);
    int8x16_t low[M], high[M];
    for (int m = 0; m < M; m++) {
        out[m] = Dots::zero();
        low[m] = vld1q_s8(x + kBlock * m);
        high[m] = vld1q_s8(x + kBlock * m + 16);
    }
#define PACELINE_COLUMNS(l)                                                                             \
    {                                                                                                \
        const uint8x16_t p = vld1q_u8(w + 32 * l), r = vld1q_u8(w + 32 * l + 16);                    \
        const int8x16_t p0 = vreinterpretq_s8_u8(vandq_u8(p, mask)), p1 = vreinterpretq_s8_u8(vshrq_n_u8(p, 4)); \
        const int8x16_t r0 = vreinterpretq_s8_u8(vandq_u8(r, mask)), r1 = vreinterpretq_s8_u8(vshrq_n_u8(r, 4)); \
        for (int m = 0; m < M; m++) {                                                                \
            out[m].a = vdotq_laneq_s32(vdotq_laneq_s32(out[m].a, p0, low[m], l), p1, high[m], l);    \
            out[m].b = vdotq_laneq_s32(vdotq_laneq_s32(out[m].b, r0, low[m], l), r1, high[m], l);    \
        }                                                                                            \
    }
    PACELINE_COLUMNS(0) PACELINE_COLUMNS(1) PACELINE_COLUMNS(2) PACELINE_COLUMNS(3)
#undef PACELINE_COLUMNS
}

template <int M> inline void dot_q8(const uint8_t* w, const int8_t* x, Dots* out) {
    // Few rows have few sums, and one waits four cycles for the sum before it: the halves of a block are summed apart.
    Dots second[M];
    for (int m = 0; m < M; m++) {
        out[m] = Dots::zero();
        second[m] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    }
    for (int half = 0; half < 2; half++, w += 128) {
        Dots* sums = M <= 2 && half ? second : out;
        int8x16_t v[M];
        for (int m = 0; m < M; m++) v[m] = vld1q_s8(x + kBlock * m + 16 * half);
#define PACELINE_COLUMNS(l)                                                                             \
    {                                                                                                \
        const int8x16_t p = vld1q_s8(reinterpret_cast<const int8_t*>(w) + 32 * l);                   \
        const int8x16_t r = vld1q_s8(reinterpret_cast<const int8_t*>(w) + 32 * l + 16);              \
        for (int m = 0; m < M; m++) {                                                                \
            sums[m].a = vdotq_laneq_s32(sums[m].a, p, v[m], l);                                      \
            sums[m].b = vdotq_laneq_s32(sums[m].b, r, v[m], l);                                      \
        }                                                                                            \
    }
        PACELINE_COLUMNS(0) PACELINE_COLUMNS(1) PACELINE_COLUMNS(2) PACELINE_COLUMNS(3)
#undef PACELINE_COLUMNS
    }
    for (int m = 0; m < M && M <= 2; m++)
        out[m] = {vaddq_s32(out[m].a, second[m].a), vaddq_s32(out[m].b, second[m].b)};
}

// The same for half of a block: w and x begin at its first column.
template <int M> inline void dot_half(const uint8_t* w, const int8_t* x, Dots* out) {
    int8x16_t v[M];
    for (int m = 0; m < M; m++) {
        out[m] = Dots::zero();
        v[m] = vld1q_s8(x + kBlock * m);
    }
#define PACELINE_COLUMNS(l)                                                                             \
    {                                                                                                \
        const int8x16_t p = vld1q_s8(reinterpret_cast<const int8_t*>(w) + 32 * l);                   \
        const int8x16_t r = vld1q_s8(reinterpret_cast<const int8_t*>(w) + 32 * l + 16);              \
        for (int m = 0; m < M; m++) {                                                                \
            out[m].a = vdotq_laneq_s32(out[m].a, p, v[m], l);                                        \
            out[m].b = vdotq_laneq_s32(out[m].b, r, v[m], l);                                        \
        }                                                                                            \
    }
    PACELINE_COLUMNS(0) PACELINE_COLUMNS(1) PACELINE_COLUMNS(2) PACELINE_COLUMNS(3)
#undef PACELINE_COLUMNS
}

inline void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }

#elif PACELINE_AVX2

struct Eight {
    __m256 v;
    static Eight zero() { return {_mm256_setzero_ps()}; }
    static Eight load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Eight load_half(const uint8_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static Eight load_bytes(const uint8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
};
inline Eight operator+(Eight x, Eight y) { return {_mm256_add_ps(x.v, y.v)}; }
inline Eight operator*(Eight x, Eight y) { return {_mm256_mul_ps(x.v, y.v)}; }
inline Eight fma(Eight x, float s, Eight z) { return {_mm256_fmadd_ps(x.v, _mm256_set1_ps(s), z.v)}; }

struct Dots {
    __m256i v;
    static Dots zero() { return {_mm256_setzero_si256()}; }
    Eight floats() const { return {_mm256_cvtepi32_ps(v)}; }
};

inline __m256i four_columns(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

template <int M> inline void dot_q4(const uint8_t* w, const int8_t* x, Dots* out) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int m = 0; m < M; m++) out[m] = Dots::zero();
    for (int l = 0; l < 4; l++) {
        const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i low = _mm256_and_si256(p, mask), high = _mm256_and_si256(_mm256_srli_epi16(p, 4), mask);
        for (int m = 0; m < M; m++) {
            // Pairs of products of [0, 15] and [-127, 127] fit 16 bits with room for their sum.
            const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, four_columns(x + kBlock * m + 4 * l)),
                                                   _mm256_maddubs_epi16(high, four_columns(x + kBlock * m + 16 + 4 * l)));
            out[m].v = _mm256_add_epi32(out[m].v, _mm256_madd_epi16(pairs, ones));
        }
    }
}

// Of `quads` times four columns.
template <int M, int quads> inline void dot_columns(const uint8_t* w, const int8_t* x, Dots* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int m = 0; m < M; m++) out[m] = Dots::zero();
    for (int l = 0; l < quads; l++) {
        const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i size = _mm256_abs_epi8(p);
        for (int m = 0; m < M; m++) {
            // |w| <= 128 and |x| <= 127: a pair of products still fits 16 bits (2 * 128 * 127 < 2^15).
            const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four_columns(x + kBlock * m + 4 * l), p));
            out[m].v = _mm256_add_epi32(out[m].v, _mm256_madd_epi16(pairs, ones));
        }
    }
}

template <int M> inline void dot_q8(const uint8_t* w, const int8_t* x, Dots* out) { dot_columns<M, 8>(w, x, out); }
template <int M> inline void dot_half(const uint8_t* w, const int8_t* x, Dots* out) { dot_columns<M, 4>(w, x, out); }

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_NTA); }

#else

struct Eight {
    float v[8];
    template <class F> static Eight each(F f) { Eight e; for (int i = 0; i < 8; i++) e.v[i] = f(i); return e; }
    static Eight zero() { return each([](int) { return 0.0f; }); }
    static Eight load(const float* p) { return each([&](int i) { return p[i]; }); }
    static Eight load_half(const uint8_t* p) {
        return each([&](int i) { uint16_t h; std::memcpy(&h, p + 2 * i, 2); return half_to_float(h); });
    }
    static Eight load_bytes(const uint8_t* p) { return each([&](int i) { return float(p[i]); }); }
    void store(float* p) const { std::memcpy(p, v, 32); }
};
inline Eight operator+(Eight x, Eight y) { return Eight::each([&](int i) { return x.v[i] + y.v[i]; }); }
inline Eight operator*(Eight x, Eight y) { return Eight::each([&](int i) { return x.v[i] * y.v[i]; }); }
inline Eight fma(Eight x, float s, Eight z) { return Eight::each([&](int i) { return std::fmaf(x.v[i], s, z.v[i]); }); }

struct Dots {
    int32_t v[8];
    Eight floats() const { return Eight::each([&](int i) { return float(v[i]); }); }
};

template <int M> inline void dot_q4(const uint8_t* w, const int8_t* x, Dots* out) {
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 8; r++) {
            int32_t sum = 0;
            for (int l = 0; l < 4; l++)
                for (int k = 0; k < 4; k++) {
                    const int byte = w[32 * l + 4 * r + k];
                    sum += (byte & 15) * x[kBlock * m + 4 * l + k] + (byte >> 4) * x[kBlock * m + 16 + 4 * l + k];
                }
            out[m].v[r] = sum;
        }
}

// Of `quads` times four columns.
template <int M, int quads> inline void dot_columns(const uint8_t* w, const int8_t* x, Dots* out) {
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 8; r++) {
            int32_t sum = 0;
            for (int l = 0; l < quads; l++)
                for (int k = 0; k < 4; k++) sum += int8_t(w[32 * l + 4 * r + k]) * x[kBlock * m + 4 * l + k];
            out[m].v[r] = sum;
        }
}

template <int M> inline void dot_q8(const uint8_t* w, const int8_t* x, Dots* out) { dot_columns<M, 8>(w, x, out); }
template <int M> inline void dot_half(const uint8_t* w, const int8_t* x, Dots* out) { dot_columns<M, 4>(w, x, out); }

inline void prefetch(const uint8_t*) {}

#endif

// ---------------------------------------------------------------- rows of activations x groups of weights

// One group of weights times M rows of a tile. The floats of an output are added block after block: (sum * scale of
// the weights) * scale of the activations, then the minimum times the activations' sum, in this order for every M. A
// scale of the whole row comes last.
template <Format format, int M>
inline void multiply(const uint8_t* w, const uint8_t* x, int blocks, float (*out)[kLanes]) {
    Eight sum[M];
    for (int m = 0; m < M; m++) sum[m] = Eight::zero();
    [[maybe_unused]] const uint8_t* supers = w + size_t(blocks) * block_bytes(format);
    for (int b = 0; b < blocks; b++, w += block_bytes(format), x += kTileBlock) {
        const int8_t* values = reinterpret_cast<const int8_t*>(x);
        const float* scales = reinterpret_cast<const float*>(x + kTileRows * kBlock);
        Dots dots[M];
        if constexpr (M <= 2) {
            // A single row is bound by memory: ask for the weights well ahead of their use.
            prefetch(w + 768);
            prefetch(w + 768 + 64);
            prefetch(w + 768 + 128);
            if constexpr (format == Format::kI8) prefetch(w + 768 + 192);
        }
        if constexpr (format == Format::kQ4 || format == Format::kQ4K) {
            dot_q4<M>(w, values, dots);
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
                sum[m] = fma(dots[m].floats() * scale, scales[m], sum[m]);
                sum[m] = fma(minimum, scales[kTileRows + m], sum[m]);
            }
        } else if constexpr (format == Format::kQ8F) {
            Dots upper[M];
            dot_half<M>(w, values, dots);
            dot_half<M>(w + 128, values + 16, upper);
            const float* floats = reinterpret_cast<const float*>(w + 256);
            const Eight first = Eight::load(floats), second = Eight::load(floats + kLanes);
            const Eight minimum = Eight::load(floats + 2 * kLanes);
            for (int m = 0; m < M; m++) {
                sum[m] = fma(dots[m].floats() * first, scales[m], sum[m]);
                sum[m] = fma(upper[m].floats() * second, scales[m], sum[m]);
                sum[m] = fma(minimum, scales[kTileRows + m], sum[m]);
            }
        } else {
            dot_q8<M>(w, values, dots);
            if constexpr (format == Format::kI8) {
                for (int m = 0; m < M; m++) sum[m] = fma(dots[m].floats(), scales[m], sum[m]);
            } else {
                const Eight scale = Eight::load_half(w + 256);
                for (int m = 0; m < M; m++) sum[m] = fma(dots[m].floats() * scale, scales[m], sum[m]);
            }
        }
    }
    if constexpr (format == Format::kI8) {
        const Eight scale = Eight::load(reinterpret_cast<const float*>(w));
        for (int m = 0; m < M; m++) sum[m] = sum[m] * scale;
    }
    for (int m = 0; m < M; m++) sum[m].store(out[m]);
}

#if PACELINE_NEON
template <Format format> inline void multiply_tile(const uint8_t* w, const uint8_t* x, int blocks, float (*out)[kLanes]) {
    if constexpr (format == Format::kI8) tile_4_int8(w, x, w, blocks, out[0]);
    else if constexpr (format == Format::kQ4 || format == Format::kQ8) tile_4<format>(w, x, blocks, out[0]);
    else multiply<format, kTileRows>(w, x, blocks, out);
}
#else
template <Format format> inline void multiply_tile(const uint8_t* w, const uint8_t* x, int blocks, float (*out)[kLanes]) {
    multiply<format, kTileRows>(w, x, blocks, out);
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
    alignas(16) float out[kTileRows][kLanes];
    for (int from = 0; from < m; from += kChunk) {
        const int to = m < from + kChunk ? m : from + kChunk;
        for (int g = first; g < last; g++) {
            const uint8_t* data = w.data + size_t(g) * w.group_bytes();
            float* target = y + size_t(g) * kLanes;
            int row = from;
#if PACELINE_NEON
            if (format == Format::kQ4 && to - from >= kPanelRows && blocks <= kPanelBlocks)
                row = multiply_panel(data, x, from, to, target, ldy, add);
            if (format == Format::kI8) row = multiply_int8(data, w.group_bytes(), x, from, to, target, ldy, add);
            if constexpr (format == Format::kQ4 || format == Format::kQ8)
                row = multiply_eights<format>(data, x, row, to, target, ldy, add);
#endif
            for (; row < to; row += kTileRows) {
                const int rows = to - row < kTileRows ? to - row : kTileRows;
                switch (rows) {
                    case 1: multiply<format, 1>(data, x.at(row, 0), blocks, out); break;
                    case 2: multiply<format, 2>(data, x.at(row, 0), blocks, out); break;
                    case 3: multiply<format, 3>(data, x.at(row, 0), blocks, out); break;
                    default: multiply_tile<format>(data, x.at(row, 0), blocks, out); break;
                }
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
