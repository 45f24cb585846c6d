// Packed weight matrices: made from a file's blocks or from floats, owned here, read by the kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "blocks.h"

namespace paceline {

// Owns the bytes of a Packed matrix, aligned to a cache line.
class Matrix {
  public:
    Matrix(Format format, int rows, int cols, bool spread = false);

    const Packed& view() const { return view_; }
    size_t bytes() const { return size_; }

    // Rows [first, first + count) from a file's rows of blocks (see blocks.h). Weights keep their values in kQ4 (Q4_0 and
    // Q4_1 only), in kQ4K (Q4_K only), in kQ8 those that have one fp16 scale a block, and in kQ8F all types but Q2_K;
    // other types in kQ8, and all of them in kI8, are rounded again. `stride` is the length of a source row in bytes.
    // first and count are multiples of kLanes. `passing`, where weights are rounded: [blocks, kBlock, kBlock], of which
    // [b][i][j] times the error of column i of a (spread) block is taken from column j > i; none: nothing is.
    void take_blocks(const uint8_t* source, size_t stride, const char* type, int first, int count,
                     const float* passing = nullptr);

    // Rows [first, first + count) from floats, rounded to 8 bits with a scale a block or a row.
    void take_floats(const float* source, int first, int count, const float* passing = nullptr);

    // One row as floats again (for an embedding).
    void row(int index, float* out) const;

  private:
    uint8_t* block(int group, int b) const;
    float* row_scale(int row) const;
    uint8_t* super(int group, int index) const;
    void check_rows(int first, int count) const;
    void take_q4(const uint8_t* source, bool minima, int row);
    void take_q4k(const uint8_t* source, int row);
    void take_codes(const Codes& codes, int b, int row);
    void take_group(const float* source, int group, const float* passing);

    std::shared_ptr<uint8_t> data_;
    size_t size_;
    Packed view_;
};

}  // namespace paceline
