// Eight rows of weights at once: their products with the same block of some rows of activations, for the instruction set
// this file is compiled for. Integer sums are exact, so every set has the same bits.
#pragma once

#include "neon_tiles.h"
#include "vectors.h"

namespace paceline {
namespace {

// A block of some rows of activations, from the first row of a tile on.
struct RowBlock {
    const uint8_t* tile;
    const int32_t* starts;
    size_t tile_bytes;  // from a tile to the next

    RowBlock(const Quantised& x, int row)
        : tile(x.at(row, 0)), starts(x.starts(row, 0)), tile_bytes(Quantised::tile_bytes(x.blocks)) {}
    const int8_t* values(int m) const { return reinterpret_cast<const int8_t*>(at(m)) + m % kTileRows * kBlock; }
    float scale(int m) const { return floats(m)[m % kTileRows]; }
    float sum(int m) const { return floats(m)[kTileRows + m % kTileRows]; }
    int32_t start(int m) const {
        return reinterpret_cast<const int32_t*>(reinterpret_cast<const uint8_t*>(starts) + m / kTileRows * tile_bytes)[m % kTileRows];
    }
    void next() {
        tile += kTileBlock;
        starts += kTileRows;
    }

private:
    const uint8_t* at(int m) const { return tile + size_t(m / kTileRows) * tile_bytes; }
    const float* floats(int m) const { return reinterpret_cast<const float*>(at(m) + kTileRows * kBlock); }
};

// kRowsAtOnce: rows of activations that pass over a group of weights together. Products of up to kWaitingRows rows wait for
// memory: they ask for weights kAhead bytes before they use them.
#if PACELINE_NEON

constexpr int kRowsAtOnce = kTileRows;
constexpr int kWaitingRows = 2, kAhead = 768;

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
template <int M> inline void dot_q4(const uint8_t* w, const RowBlock& x, Dots* out) {
    const uint8x16_t mask = vdupq_n_u8(15);
    int8x16_t low[M], high[M];
    for (int m = 0; m < M; m++) {
        out[m] = Dots::zero();
        low[m] = vld1q_s8(x.values(m));
        high[m] = vld1q_s8(x.values(m) + 16);
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

template <int M> inline void dot_q8(const uint8_t* w, const RowBlock& x, Dots* out) {
    // Few rows have few sums, and one waits four cycles for the sum before it: the halves of a block are summed apart.
    Dots second[M];
    for (int m = 0; m < M; m++) {
        out[m] = Dots::zero();
        second[m] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    }
    for (int half = 0; half < 2; half++, w += 128) {
        Dots* sums = M <= 2 && half ? second : out;
        int8x16_t v[M];
        for (int m = 0; m < M; m++) v[m] = vld1q_s8(x.values(m) + 16 * half);
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

// The same for half of a block: w is its first column's, which is `column` in x.
template <int M> inline void dot_half(const uint8_t* w, const RowBlock& x, int column, Dots* out) {
    int8x16_t v[M];
    for (int m = 0; m < M; m++) {
        out[m] = Dots::zero();
        v[m] = vld1q_s8(x.values(m) + column);
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

#if PACELINE_VNNI
constexpr int kWaitingRows = 16, kAhead = 8192;  // two groups at once are through with theirs sooner
#else
constexpr int kWaitingRows = 8, kAhead = 2048;
#endif

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

#if PACELINE_VNNI

constexpr int kRowsAtOnce = 8;  // twice as many vector registers hold twice as many sums
// The same over two groups. 32 registers hold two sums for each of 12 rows and what is multiplied; a pass of its own for a
// few rows more would take longer than keeping the sums of up to 16 in memory does.
constexpr int kPairRows = 12, kMostPairRows = 16;

// Bytes without a sign times bytes with one, summed by fours onto 32 bits: nothing can overflow.
template <int M> inline void dot_q4(const uint8_t* w, const RowBlock& x, Dots* out) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int m = 0; m < M; m++) out[m] = Dots::zero();
    for (int l = 0; l < 4; l++) {
        const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i low = _mm256_and_si256(p, mask), high = _mm256_and_si256(_mm256_srli_epi16(p, 4), mask);
        for (int m = 0; m < M; m++) {
            out[m].v = _mm256_dpbusd_epi32(out[m].v, low, four_columns(x.values(m) + 4 * l));
            out[m].v = _mm256_dpbusd_epi32(out[m].v, high, four_columns(x.values(m) + 16 + 4 * l));
        }
    }
}

// Weights lose their sign by 128 more, which the start of the sum has taken off.
template <int M> inline void dot_q8(const uint8_t* w, const RowBlock& x, Dots* out) {
    const __m256i more = _mm256_set1_epi8(-128);
    for (int m = 0; m < M; m++) out[m].v = _mm256_set1_epi32(x.start(m));
    for (int l = 0; l < 8; l++) {
        const __m256i p = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l)), more);
        for (int m = 0; m < M; m++)
            out[m].v = _mm256_dpbusd_epi32(out[m].v, p, four_columns(x.values(m) + 4 * l));
    }
}

// Half of a block has no start: the sign of a weight goes to the activation.
template <int M> inline void dot_half(const uint8_t* w, const RowBlock& x, int column, Dots* out) {
    for (int m = 0; m < M; m++) out[m] = Dots::zero();
    for (int l = 0; l < 4; l++) {
        const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i size = _mm256_abs_epi8(p);
        for (int m = 0; m < M; m++)
            out[m].v = _mm256_dpbusd_epi32(out[m].v, size, _mm256_sign_epi8(four_columns(x.values(m) + column + 4 * l), p));
    }
}

// Two groups side by side: a lane is still an output, and what happens in it the same.
struct Sixteen {
    __m512 v;
    static Sixteen zero() { return {_mm512_setzero_ps()}; }
    static Sixteen load(const float* p, const float* q) {
        return {_mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(p))),
                                                    _mm256_castps_pd(_mm256_loadu_ps(q)), 1))};
    }
    static Sixteen load_half(const uint8_t* p, const uint8_t* q) {
        return {_mm512_cvtph_ps(_mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(q)), 1))};
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
};
inline Sixteen operator*(Sixteen x, Sixteen y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline Sixteen fma(Sixteen x, float s, Sixteen z) { return {_mm512_fmadd_ps(x.v, _mm512_set1_ps(s), z.v)}; }

struct __attribute__((packed, may_alias)) Four {
    int32_t columns;
};

// dot_q8 of a block of two groups.
template <int M> inline void dot_q8_pair(const uint8_t* w, const uint8_t* other, const RowBlock& x, Sixteen* out) {
    const __m512i more = _mm512_set1_epi8(-128);
    __m512i sums[M];
    for (int m = 0; m < M; m++) sums[m] = _mm512_set1_epi32(x.start(m));
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(other + 32 * l));
        const __m512i p = _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), more);
        for (int m = 0; m < M; m++) {
            // Of the intrinsic compilers make two instructions, and spill.
            const Four* four = reinterpret_cast<const Four*>(x.values(m) + 4 * l);
            asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[m]) : "v"(p), "m"(*four));
        }
    }
    for (int m = 0; m < M; m++) out[m] = {_mm512_cvtepi32_ps(sums[m])};
}

#else

constexpr int kRowsAtOnce = kTileRows;

template <int M> inline void dot_q4(const uint8_t* w, const RowBlock& x, Dots* out) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int m = 0; m < M; m++) out[m] = Dots::zero();
    for (int l = 0; l < 4; l++) {
        const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i low = _mm256_and_si256(p, mask), high = _mm256_and_si256(_mm256_srli_epi16(p, 4), mask);
        for (int m = 0; m < M; m++) {
            // Pairs of products of [0, 15] and [-127, 127] fit 16 bits with room for their sum.
            const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, four_columns(x.values(m) + 4 * l)),
                                                   _mm256_maddubs_epi16(high, four_columns(x.values(m) + 16 + 4 * l)));
            out[m].v = _mm256_add_epi32(out[m].v, _mm256_madd_epi16(pairs, ones));
        }
    }
}

// Of `quads` times four columns, from `column` on in x.
template <int M, int quads> inline void dot_columns(const uint8_t* w, const RowBlock& x, int column, Dots* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int m = 0; m < M; m++) out[m] = Dots::zero();
    for (int l = 0; l < quads; l++) {
        const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 * l));
        const __m256i size = _mm256_abs_epi8(p);
        for (int m = 0; m < M; m++) {
            // |w| <= 128 and |x| <= 127: a pair of products still fits 16 bits (2 * 128 * 127 < 2^15).
            const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four_columns(x.values(m) + column + 4 * l), p));
            out[m].v = _mm256_add_epi32(out[m].v, _mm256_madd_epi16(pairs, ones));
        }
    }
}

template <int M> inline void dot_q8(const uint8_t* w, const RowBlock& x, Dots* out) { dot_columns<M, 8>(w, x, 0, out); }
template <int M> inline void dot_half(const uint8_t* w, const RowBlock& x, int column, Dots* out) {
    dot_columns<M, 4>(w, x, column, out);
}

#endif

// Not past the second-level cache (NTA): one row takes 1.7 times as long where the processor's own guesses, which go there,
// lose what they have fetched.
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

#else

constexpr int kRowsAtOnce = kTileRows;
constexpr int kWaitingRows = 0, kAhead = 0;

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

template <int M> inline void dot_q4(const uint8_t* w, const RowBlock& x, Dots* out) {
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 8; r++) {
            int32_t sum = 0;
            for (int l = 0; l < 4; l++)
                for (int k = 0; k < 4; k++) {
                    const int byte = w[32 * l + 4 * r + k];
                    sum += (byte & 15) * x.values(m)[4 * l + k] + (byte >> 4) * x.values(m)[16 + 4 * l + k];
                }
            out[m].v[r] = sum;
        }
}

// Of `quads` times four columns, from `column` on in x.
template <int M, int quads> inline void dot_columns(const uint8_t* w, const RowBlock& x, int column, Dots* out) {
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 8; r++) {
            int32_t sum = 0;
            for (int l = 0; l < quads; l++)
                for (int k = 0; k < 4; k++) sum += int8_t(w[32 * l + 4 * r + k]) * x.values(m)[column + 4 * l + k];
            out[m].v[r] = sum;
        }
}

template <int M> inline void dot_q8(const uint8_t* w, const RowBlock& x, Dots* out) { dot_columns<M, 8>(w, x, 0, out); }
template <int M> inline void dot_half(const uint8_t* w, const RowBlock& x, int column, Dots* out) {
    dot_columns<M, 4>(w, x, column, out);
}

inline void prefetch(const uint8_t*) {}

#endif

}  // namespace
}  // namespace paceline
