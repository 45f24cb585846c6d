#include "packing.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "halves.h"

namespace paceline {

namespace {

constexpr size_t kReadAhead = 4096;  // kernels ask for weights ahead of their use, also at the very end

float largest(const float* x, int count) {
    float found = 0.0f;
    for (int i = 0; i < count; i++) found = std::fabs(x[i]) > found ? std::fabs(x[i]) : found;
    return found;
}

float inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// Adding 1.5 * 2^23 rounds to an integer, as the bits below the sum's last one are dropped to nearest even.
float level(float x) {
    const float value = (x + 12582912.0f) - 12582912.0f;
    return value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value;
}

// The Hadamard transform of a block (spread.h), times `factor`. Twice with factors whose product is 1 / kBlock is nothing.
void spread_block(float* x, float factor) {
    for (int n = 1; n < kBlock; n *= 2)
        for (int i = 0; i < kBlock; i += 2 * n)
            for (int j = i; j < i + n; j++) {
                const float a = x[j], b = x[j + n];
                x[j] = a + b;
                x[j + n] = a - b;
            }
    for (int i = 0; i < kBlock; i++) x[i] *= factor;
}

// Rounds the block's columns one after the other to multiples of `scale`; those after it make up for a column's error.
void settle_block(float* x, float factor, float scale, const float* passing) {
    for (int i = 0; i < kBlock; i++, passing += kBlock) {
        const float rounded = level(x[i] * factor) * scale, error = x[i] - rounded;
        x[i] = rounded;
        for (int j = i + 1; j < kBlock; j++) x[j] -= error * passing[j];
    }
}

// kBlock floats of one row to 8 bits, at their places in a block of kLanes rows.
void round_block(const float* in, float factor, uint8_t* out) {
    int8_t rounded[kBlock];
    for (int k = 0; k < kBlock; k++) rounded[k] = int8_t(level(in[k] * factor));
    for (int l = 0; l < kBlock / 4; l++) std::memcpy(out + 32 * l, rounded + 4 * l, 4);
}

}  // namespace

void Matrix::Free::operator()(uint8_t* p) const { std::free(p); }

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
    const size_t whole = (size_ + kReadAhead + 63) / 64 * 64;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, whole)));
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get() + size_, 0, whole - size_);
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
    std::vector<float> whole(rounds ? size_t(view_.cols) : 0);
    Codes codes[kSuper];
    for (int row = first; row < first + count; row++, source += stride) {
        if (format == Format::kQ4) take_q4(source, kind == "Q4_1", row);
        else if (format == Format::kQ4K) take_q4k(source, row);
        else {
            const uint8_t* in = source;
            for (int b = 0; b < view_.blocks(); b += many, in += type->bytes) {
                type->read(in, codes);
                for (int i = 0; i < many; i++)
                    if (rounds) codes[i].floats(whole.data() + (b + i) * kBlock);
                    else take_codes(codes[i], b + i, row);
            }
            if (format == Format::kI8) take_row_whole(whole.data(), row, passing);
            else if (rounds) take_row_in_blocks(whole.data(), row, passing);
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
    for (int r = 0; r < count; r++) {
        const float* in = source + size_t(r) * size_t(view_.cols);
        if (view_.format == Format::kI8) take_row_whole(in, first + r, passing);
        else take_row_in_blocks(in, first + r, passing);
    }
}

void Matrix::take_row_in_blocks(const float* in, int row, const float* passing) {
    const int group = row / kLanes, lane = row % kLanes;
    for (int b = 0; b < view_.blocks(); b++, in += kBlock) {
        float x[kBlock];
        std::memcpy(x, in, sizeof x);
        if (view_.spread) spread_block(x, 1.0f / kBlock);
        const uint16_t half = half_of_float(largest(x, kBlock) / 127.0f);
        const float scale = float_of_half(half);
        uint8_t* out = block(group, b);
        if (passing != nullptr) settle_block(x, inverse(scale), scale, passing + size_t(b) * kBlock * kBlock);
        round_block(x, inverse(scale), out + 4 * lane);
        std::memcpy(out + 256 + 2 * lane, &half, 2);
    }
}

void Matrix::take_row_whole(const float* in, int row, const float* passing) {
    const int group = row / kLanes, lane = row % kLanes;
    std::vector<float> whole(in, in + view_.cols);
    for (int b = 0; b < view_.blocks() && view_.spread; b++) spread_block(whole.data() + b * kBlock, 1.0f / kBlock);
    const float scale = largest(whole.data(), view_.cols) / 127.0f, factor = inverse(scale);
    for (int b = 0; b < view_.blocks(); b++) {
        float* x = whole.data() + b * kBlock;
        if (passing != nullptr) settle_block(x, factor, scale, passing + size_t(b) * kBlock * kBlock);
        round_block(x, factor, block(group, b) + 4 * lane);
    }
    *row_scale(row) = scale;
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
            if (view_.spread) spread_block(out, 1.0f);
        }
    }
}

}  // namespace paceline
