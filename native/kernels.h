// The numeric primitives, one table of functions for each instruction set.
//
// Exact by construction: what is computed for a row depends on that row alone. Integer sums are exact; every float
// is the result of one fixed sequence of operations, whatever the number of rows, the tile or the thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

constexpr int kBlock = 32;   // columns that share a scale, in weights and activations
constexpr int kLanes = 8;    // output rows interleaved in a packed matrix
constexpr int kTile = 64;    // keys of an attention tile; tiles begin at multiples of this position

// kQ4: (value * scale + minimum) in 4 bits, kQ8: (value * scale) in 8, both per block of kBlock columns;
// kI8: (value * scale) in 8 bits with one scale for the whole row.
// kQ4K: as kQ4, scale and minimum being whole numbers of 8 bits times an fp16 number for kSuper blocks of a row;
// kQ8F: (value * scale + minimum) in 8 bits, in floats: a scale per half of a block and a minimum per block.
enum class Format : int { kQ4 = 0, kQ8 = 1, kI8 = 2, kQ4K = 3, kQ8F = 4 };

constexpr int kSuper = 8;

// Bytes of one block of kBlock columns x kLanes rows: the values, then the block's scales (and minima): as fp16, as
// bytes (kQ4K) or as floats (kQ8F).
constexpr size_t block_bytes(Format format) {
    switch (format) {
        case Format::kQ4: return 128 + 32;
        case Format::kQ8: return 256 + 16;
        case Format::kQ4K: return 128 + 16;
        case Format::kQ8F: return 256 + 96;
        default: return 256;
    }
}

// Bytes of a group behind its blocks: the rows' scales as floats; for kQ4K and each kSuper blocks what the scales are
// multiples of, then the same for the minima, as fp16.
constexpr size_t tail_bytes(Format format, int blocks) {
    return format == Format::kI8 ? kLanes * sizeof(float) : format == Format::kQ4K ? size_t(blocks / kSuper) * 4 * kLanes : 0;
}

// A weight matrix [rows, cols]: groups of kLanes rows, block after block of columns, then the tail.
struct Packed {
    Format format = Format::kQ8;
    int rows = 0;
    int cols = 0;
    const uint8_t* data = nullptr;
    // Each block of a row was spread before it was rounded (spread.h), and so is each block of activations that meets it:
    // outliers are what rounding suffers from. kQ8 and kI8 only, as spread values are no longer the file's.
    bool spread = false;

    int groups() const { return rows / kLanes; }
    int blocks() const { return cols / kBlock; }
    size_t group_bytes() const { return size_t(blocks()) * block_bytes(format) + tail_bytes(format, blocks()); }
};

constexpr int kTileRows = 4;  // rows of activations that are kept together
// Bytes of one block of kTileRows rows: the values row after row, then the rows' scales, then their (scaled) sums.
constexpr size_t kTileBlock = kTileRows * (kBlock + 2 * sizeof(float));

// Rows of activations in int8, with a scale and the (scaled) sum of the values for each block of a row: tiles of
// kTileRows rows, block after block, then the starts. The last tile may hold fewer rows; what is in the others does not
// matter. A start is -128 times the sum of a block's values: what a sum of products begins with where 128 is added to every
// weight, for instructions that take only one of their factors with a sign.
struct Quantised {
    uint8_t* data = nullptr;
    int blocks = 0;  // of a row

    static size_t tile_bytes(int blocks) { return size_t(blocks) * (kTileBlock + kTileRows * sizeof(int32_t)); }
    // One block more than there are: kernels load the next block's values while they work on the last.
    static size_t bytes(int rows, int blocks) {
        return size_t((rows + kTileRows - 1) / kTileRows) * tile_bytes(blocks) + kTileBlock;
    }
    uint8_t* at(int row, int block) const {
        return data + size_t(row / kTileRows) * tile_bytes(blocks) + size_t(block) * kTileBlock;
    }
    // Of all rows of a tile: kTileRows numbers for a block.
    int32_t* starts(int row, int block) const {
        return reinterpret_cast<int32_t*>(at(row, blocks)) + size_t(block) * kTileRows;
    }
};

enum class Cache : int { kF32 = 0, kF16 = 1, kI8 = 2 };

// Keys or values of a tile: where each of `count` tokens lies for one head, and its scale (int8 only).
struct KeyTile {
    const void* key[kTile];
    const void* value[kTile];
    float key_scale[kTile];
    float value_scale[kTile];
    int count = 0;
    // Bytes from the vectors of four tokens to those of the four a tile further on: the kernels ask for them while they
    // work. 0: not known, or not side by side.
    int64_t ahead[kTile / 4] = {};
};

struct Kernels {
    const char* name;

    // x, `count` blocks of one row, to the row's blocks from `first` on, for matrices that are spread or for others.
    void (*quantise)(const float* x, int count, const Quantised& out, int row, int first, bool spread);

    // A block of kLanes rows of weights, column after column, to whole numbers of their scales, to its place in a matrix
    // of 8 bits. `passing` [kBlock, kBlock], or none: [i][j] times the error of column i is taken from column j > i. x
    // is overwritten.
    void (*round_block)(float* x, const float* scale, const float* passing, uint8_t* out);

    // x * weight / rms(x), one row.
    void (*rms_norm)(const float* x, const float* weight, float eps, int cols, float* out);

    // silu(gate) * up, elementwise on one row's slice.
    void (*silu_mul)(const float* gate, const float* up, int count, float* out);

    // Rotary embedding in place: pairs (i, i + half) of one head.
    void (*rotate)(float* x, const float* cos, const float* sin, int half);

    // y[m][8 g .. 8 g + 7] (+)= x[m] . w for groups [first, last) and all m; ldy in floats. `add`: onto what is there.
    void (*gemm)(const Packed& w, const Quantised& x, int m, int first, int last, float* y, int ldy, bool add);

    // For int8 caches: a query, d floats already scaled, becomes d int8 values with their scale behind them, in place.
    void (*pack_query)(float* q, int d);

    // Attention of `queries` query vectors (each q[i], d floats, already scaled; packed for int8) over one tile. Query i sees keys
    // [low[i], high[i]) of it. out[i] = sum p v (d floats), peak[i] the largest score (-inf: saw nothing), mass[i] = sum p.
    void (*attend)(const float* const* q, int queries, const int* low, const int* high, const KeyTile& tile,
                   Cache cache, int d, float* const* out, float* peak, float* mass);

    // Fold a tile's result into a running one (peak -inf: nothing yet): both are rescaled to the larger peak.
    void (*combine)(float* out, float* peak, float* mass, const float* more, float more_peak, float more_mass, int d);

    // out = x / mass.
    void (*divide)(const float* x, float mass, int d, float* out);

    // One token's key or value of one head into the cache; returns its scale (1 for the float formats). x may be overwritten.
    float (*store)(float* x, int d, Cache cache, bool key, void* target);
};

// Every table there is, the best first.
constexpr const char* kKernelNames[] = {"neon", "avx512vnni", "avx2", "portable"};

// The best table this machine can run, or the one asked for; nullptr if it cannot run here.
const Kernels* best_kernels();
const Kernels* kernels_by_name(const char* name);

inline size_t cache_bytes(Cache cache) { return cache == Cache::kF32 ? 4 : cache == Cache::kF16 ? 2 : 1; }

}  // namespace paceline
