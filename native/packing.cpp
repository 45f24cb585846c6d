#include "packing.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "halves.h"
#include "memory.h"

namespace paceline {

namespace {

constexpr size_t kReadAhead = 4096;  // kernels ask for weights ahead of their use, also at the very end

// The Hadamard transform of a block (spread.h) of `lanes` rows side by side, times `factor`. Twice with factors whose product
// is 1 / kBlock is nothing.
template <int lanes> void spread_block(float* x, float factor) {
    for (int n = 1; n < kBlock; n *= 2)
        for (int i = 0; i < kBlock; i += 2 * n)
            for (int j = i * lanes; j < (i + n) * lanes; j++) {
                const float a = x[j], b = x[j + n * lanes];
                x[j] = a + b;
                x[j + n * lanes] = a - b;
            }
    for (int i = 0; i < kBlock * lanes; i++) x[i] *= factor;
}

// kLanes rows of `cols` floats, side by side.
void interleave(const float* rows, int cols, float* out) {
    for (int r = 0; r < kLanes; r++)
        for (int c = 0; c < cols; c++) out[c * kLanes + r] = rows[size_t(r) * size_t(cols) + size_t(c)];
}

// The largest size of each row.
void largest(const float* x, int cols, float* out) {
    for (int r = 0; r < kLanes; r++) out[r] = 0.0f;
    for (int c = 0; c < cols; c++)
        for (int r = 0; r < kLanes; r++) {
            const float size = std::fabs(x[c * kLanes + r]);
            out[r] = size > out[r] ? size : out[r];
        }
}

}  // namespace

Matrix::Matrix(Format format, int rows, int cols, bool spread) {
    if (rows <= 0 || cols <= 0 || rows % kLanes || cols % kBlock)
        throw std::invalid_argument("a packed matrix needs rows in eights and columns in blocks of 32, got " +
                                    std::to_string(rows) + " x " + std::to_string(cols));
    if (format == Format::kQ4K && cols % (kSuper * kBlock))
        throw std::invalid_argument("blocks of 256 columns do not fill rows of " + std::to_string(cols));
    if (spread && format != Format::kQ8 && format != Format::kI8)
        throw std::invalid_argument("only matrices of the forms i8 and q8 can be spread");
    view_ = Packed{format, rows, cols, nullptr, spread};
    size_ = size_t(view_.groups()) * view_.group_bytes();
    data_ = lasting(size_ + kReadAhead);
    std::memset(data_.get() + size_, 0, kReadAhead);
    view_.data = data_.get();
}

uint8_t* Matrix::block(int group, int b) const {
    return data_.get() + group * view_.group_bytes() + size_t(b) * block_bytes(view_.format);
}

float* Matrix::row_scale(int row) const {
    return reinterpret_cast<float*>(block(row / kLanes, view_.blocks())) + row % kLanes;
}

uint8_t* Matrix::super(int group, int index) const {
    return block(group, view_.blocks()) + size_t(index) * 4 * kLanes;
}

void Matrix::check_rows(int first, int count) const {
    if (first < 0 || count < 0 || first % kLanes || count % kLanes || first + count > view_.rows)
        throw std::invalid_argument("rows to pack must come in eights and lie inside the matrix");
}

void Matrix::take_blocks(const uint8_t* source, size_t stride, const char* name, int first, int count,
                         const float* passing) {
    const BlockType* type = block_type(name);
    const std::string kind = name;
    if (type == nullptr) throw std::invalid_argument("blocks of type " + kind + " cannot be packed");
    const Format format = view_.format;
    if ((format == Format::kQ4 && kind != "Q4_0" && kind != "Q4_1") || (format == Format::kQ4K && kind != "Q4_K") ||
        (format == Format::kQ8F && !type->one_offset))
        throw std::invalid_argument("blocks of type " + kind + " do not fit a matrix of this form");
    check_rows(first, count);
    if (view_.cols % type->weights) throw std::invalid_argument("blocks of type " + kind + " do not fill a row");
    if (stride < size_t(view_.cols / type->weights) * type->bytes)
        throw std::invalid_argument("a source row is too short for its blocks");
    const bool rounds = format == Format::kI8 || (format == Format::kQ8 && (view_.spread || !type->one_half));
    const int many = type->weights / kBlock;
    std::vector<float> whole(rounds ? size_t(view_.cols) * kLanes : 0);
    Codes codes[kSuper];
    for (int row = first; row < first + count; row++, source += stride) {
        if (format == Format::kQ4) take_q4(source, kind == "Q4_1", row);
        else if (format == Format::kQ4K) take_q4k(source, row);
        else {
            const uint8_t* in = source;
            for (int b = 0; b < view_.blocks(); b += many, in += type->bytes) {
                type->read(in, codes);
                for (int i = 0; i < many; i++)
                    if (rounds) codes[i].floats(whole.data() + size_t(row % kLanes) * size_t(view_.cols) + (b + i) * kBlock);
                    else take_codes(codes[i], b + i, row);
            }
            if (rounds && row % kLanes == kLanes - 1) take_group(whole.data(), row / kLanes, passing);
        }
    }
}

// A source byte k holds columns k (low) and k + 16 (high): exactly the halves the kernel wants.
void Matrix::take_q4(const uint8_t* in, bool minima, int row) {
    const int group = row / kLanes, lane = row % kLanes;
    for (int b = 0; b < view_.blocks(); b++, in += minima ? 20 : 18) {
        uint8_t* out = block(group, b);
        const uint8_t* nibbles = in + (minima ? 4 : 2);
        for (int l = 0; l < 4; l++) std::memcpy(out + 32 * l + 4 * lane, nibbles + 4 * l, 4);
        const uint16_t minimum = minima ? half_at(in + 2) : half_of_float(-8.0f * float_of_half(half_at(in)));
        std::memcpy(out + 128 + 2 * lane, in, 2);
        std::memcpy(out + 144 + 2 * lane, &minimum, 2);
    }
}

// 32 source bytes hold a block in their low halves and the next one in their high halves.
void Matrix::take_q4k(const uint8_t* in, int row) {
    const int group = row / kLanes, lane = row % kLanes;
    for (int b = 0; b < view_.blocks(); b += kSuper, in += 144) {
        uint8_t scales[kSuper], offsets[kSuper];
        six_bit_scales(in + 4, scales, offsets);
        for (int i = 0; i < kSuper; i++) {
            uint8_t* out = block(group, b + i);
            const uint8_t* codes = in + 16 + 32 * (i / 2);
            const int shift = 4 * (i % 2);
            for (int k = 0; k < kHalf; k++)
                out[32 * (k / 4) + 4 * lane + k % 4] =
                    uint8_t((codes[k] >> shift & 15) | (codes[k + kHalf] >> shift & 15) << 4);
            out[128 + lane] = scales[i];
            out[128 + kLanes + lane] = offsets[i];
        }
        uint8_t* units = super(group, b / kSuper);
        const uint16_t negative = half_at(in + 2) ^ 0x8000;  // offsets are taken away, minima added
        std::memcpy(units + 2 * lane, in, 2);
        std::memcpy(units + 2 * kLanes + 2 * lane, &negative, 2);
    }
}

void Matrix::take_codes(const Codes& codes, int b, int row) {
    const int lane = row % kLanes;
    uint8_t* out = block(row / kLanes, b);
    for (int l = 0; l < 8; l++) std::memcpy(out + 32 * l + 4 * lane, codes.value + 4 * l, 4);
    if (view_.format == Format::kQ8) {
        const uint16_t scale = half_of_float(codes.scale[0]);
        std::memcpy(out + 256 + 2 * lane, &scale, 2);
    } else {
        float* floats = reinterpret_cast<float*>(out + 256) + lane;
        floats[0] = codes.scale[0];
        floats[kLanes] = codes.scale[1];
        floats[2 * kLanes] = codes.offset[0];
    }
}

void Matrix::take_floats(const float* source, int first, int count, const float* passing) {
    if (view_.format != Format::kI8 && view_.format != Format::kQ8)
        throw std::invalid_argument("floats are packed into matrices of the forms i8 and q8 only");
    check_rows(first, count);
    for (int r = 0; r < count; r += kLanes)
        take_group(source + size_t(r) * size_t(view_.cols), (first + r) / kLanes, passing);
}

void Matrix::take_group(const float* source, int group, const float* passing) {
    std::vector<float> all(size_t(view_.cols) * kLanes);
    float* x = all.data();
    interleave(source, view_.cols, x);
    float scale[kLanes];
    const Kernels* kernels = best_kernels();
    const auto block_of = [&](int b) { return x + size_t(b) * kBlock * kLanes; };
    for (int b = 0; b < view_.blocks() && view_.spread; b++) spread_block<kLanes>(block_of(b), 1.0f / kBlock);
    if (view_.format == Format::kI8) {
        largest(x, view_.cols, scale);
        for (int r = 0; r < kLanes; r++) *row_scale(group * kLanes + r) = scale[r] /= 127.0f;
    }
    for (int b = 0; b < view_.blocks(); b++) {
        uint8_t* out = block(group, b);
        if (view_.format == Format::kQ8) {
            largest(block_of(b), kBlock, scale);
            for (int r = 0; r < kLanes; r++) {
                const uint16_t half = half_of_float(scale[r] / 127.0f);
                std::memcpy(out + 256 + 2 * r, &half, 2);
                scale[r] = float_of_half(half);
            }
        }
        kernels->round_block(block_of(b), scale, passing == nullptr ? nullptr : passing + size_t(b) * kBlock * kBlock, out);
    }
}

void Matrix::row(int index, float* out) const {
    const int group = index / kLanes, lane = index % kLanes;
    for (int b = 0; b < view_.blocks(); b++, out += kBlock) {
        const uint8_t* in = block(group, b);
        if (view_.format == Format::kQ4 || view_.format == Format::kQ4K) {
            const bool fp16 = view_.format == Format::kQ4;
            const uint8_t* units = fp16 ? nullptr : super(group, b / kSuper) + 2 * lane;
            const float scale = fp16 ? float_of_half(half_at(in + 128 + 2 * lane))
                                     : float_of_half(half_at(units)) * float(in[128 + lane]);
            const float minimum = fp16 ? float_of_half(half_at(in + 144 + 2 * lane))
                                       : float_of_half(half_at(units + 2 * kLanes)) * float(in[128 + kLanes + lane]);
            for (int k = 0; k < 16; k++) {
                const int byte = in[32 * (k / 4) + 4 * lane + k % 4];
                out[k] = float(byte & 15) * scale + minimum;
                out[k + 16] = float(byte >> 4) * scale + minimum;
            }
        } else if (view_.format == Format::kQ8F) {
            const float* floats = reinterpret_cast<const float*>(in + 256) + lane;
            for (int k = 0; k < kBlock; k++)
                out[k] = float(int8_t(in[32 * (k / 4) + 4 * lane + k % 4])) * floats[k < kHalf ? 0 : kLanes] + floats[2 * kLanes];
        } else {
            const bool whole = view_.format == Format::kI8;
            const float scale = whole ? *row_scale(index) : float_of_half(half_at(in + 256 + 2 * lane));
            for (int k = 0; k < kBlock; k++) out[k] = float(int8_t(in[32 * (k / 4) + 4 * lane + k % 4])) * scale;
            if (view_.spread) spread_block<1>(out, 1.0f);
        }
    }
}

}  // namespace paceline
