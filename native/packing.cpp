#include "packing.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace paceline {

namespace {

constexpr size_t kReadAhead = 4096;  // kernels ask for weights ahead of their use, also at the very end

float half_to_float(uint16_t h) {
    const float sign = h & 0x8000 ? -1.0f : 1.0f;
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 0) return sign * std::ldexp(float(mantissa), -24);
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * std::ldexp(float(mantissa + 1024), exponent - 25);
}

uint16_t float_to_half(float f) {
    const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    const float a = std::fabs(f);
    if (std::isnan(f)) return 0x7e00;
    if (a >= 65520.0f) return uint16_t(sign | 0x7c00);
    if (a < 6.103515625e-05f) return uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(a, 24))));
    int exponent;
    const float mantissa = std::frexp(a, &exponent);  // a = mantissa * 2^exponent, mantissa in [0.5, 1)
    const int rounded = int(std::nearbyint(std::ldexp(mantissa, 11)));  // 1024 .. 2048
    return uint16_t(sign | (((exponent + 14) << 10) + (rounded - 1024)));
}

uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}

float largest(const float* x, int count) {
    float found = 0.0f;
    for (int i = 0; i < count; i++) found = std::fabs(x[i]) > found ? std::fabs(x[i]) : found;
    return found;
}

float inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// kBlock floats of one row to 8 bits, at their places in a block of kLanes rows.
void round_block(const float* in, float factor, uint8_t* out) {
    int8_t rounded[kBlock];
    for (int k = 0; k < kBlock; k++) {
        // Adding 1.5 * 2^23 rounds to an integer, as the bits below the sum's last one are dropped to nearest even.
        const float value = (in[k] * factor + 12582912.0f) - 12582912.0f;
        rounded[k] = int8_t(value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value);
    }
    for (int l = 0; l < kBlock / 4; l++) std::memcpy(out + 32 * l, rounded + 4 * l, 4);
}

void floats_of_block(const uint8_t* in, const std::string& kind, float* out) {
    const float scale = half_to_float(half_at(in));
    if (kind == "Q8_0") {
        for (int k = 0; k < kBlock; k++) out[k] = float(int8_t(in[2 + k])) * scale;
        return;
    }
    const float minimum = kind == "Q4_1" ? half_to_float(half_at(in + 2)) : -8.0f * scale;
    const uint8_t* nibbles = in + (kind == "Q4_1" ? 4 : 2);
    for (int k = 0; k < 16; k++) {
        out[k] = float(nibbles[k] & 15) * scale + minimum;
        out[k + 16] = float(nibbles[k] >> 4) * scale + minimum;
    }
}

}  // namespace

void Matrix::Free::operator()(uint8_t* p) const { std::free(p); }

Matrix::Matrix(Format format, int rows, int cols) {
    if (rows <= 0 || cols <= 0 || rows % kLanes || cols % kBlock)
        throw std::invalid_argument("a packed matrix needs rows in eights and columns in blocks of 32, got " +
                                    std::to_string(rows) + " x " + std::to_string(cols));
    view_ = Packed{format, rows, cols, nullptr};
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
    return reinterpret_cast<float*>(block(row / kLanes, view_.cols / kBlock)) + row % kLanes;
}

void Matrix::check_rows(int first, int count) const {
    if (first < 0 || count < 0 || first % kLanes || count % kLanes || first + count > view_.rows)
        throw std::invalid_argument("rows to pack must come in eights and lie inside the matrix");
}

void Matrix::take_blocks(const uint8_t* source, size_t stride, const char* type, int first, int count) {
    const std::string kind = type;
    const bool four = kind == "Q4_0" || kind == "Q4_1";
    if (!four && kind != "Q8_0") throw std::invalid_argument("blocks of type " + kind + " cannot be packed");
    if (view_.format != Format::kI8 && four != (view_.format == Format::kQ4))
        throw std::invalid_argument("blocks of type " + kind + " do not fit a matrix of the other width");
    check_rows(first, count);
    const size_t block_size = kind == "Q4_0" ? 18 : kind == "Q4_1" ? 20 : 34;
    const int blocks = view_.cols / kBlock;
    if (stride < blocks * block_size) throw std::invalid_argument("a source row is too short for its blocks");
    if (view_.format == Format::kI8) {
        std::vector<float> whole(static_cast<size_t>(view_.cols));
        for (int r = 0; r < count; r++) {
            const uint8_t* in = source + size_t(r) * stride;
            for (int b = 0; b < blocks; b++, in += block_size) floats_of_block(in, kind, whole.data() + b * kBlock);
            take_row_whole(whole.data(), first + r);
        }
        return;
    }
    for (int r = 0; r < count; r++) {
        const int group = (first + r) / kLanes, lane = (first + r) % kLanes;
        const uint8_t* in = source + size_t(r) * stride;
        for (int b = 0; b < blocks; b++, in += block_size) {
            uint8_t* out = block(group, b);
            if (four) {
                // A source byte k holds columns k (low) and k + 16 (high): exactly the halves the kernel wants.
                const uint8_t* nibbles = in + (kind == "Q4_0" ? 2 : 4);
                for (int l = 0; l < 4; l++) std::memcpy(out + 32 * l + 4 * lane, nibbles + 4 * l, 4);
                const uint16_t minimum = kind == "Q4_1" ? half_at(in + 2) : float_to_half(-8.0f * half_to_float(half_at(in)));
                std::memcpy(out + 128 + 2 * lane, in, 2);
                std::memcpy(out + 144 + 2 * lane, &minimum, 2);
            } else {
                for (int l = 0; l < 8; l++) std::memcpy(out + 32 * l + 4 * lane, in + 2 + 4 * l, 4);
                std::memcpy(out + 256 + 2 * lane, in, 2);
            }
        }
    }
}

void Matrix::take_floats(const float* source, int first, int count) {
    if (view_.format == Format::kQ4) throw std::invalid_argument("floats are packed into 8-bit matrices only");
    check_rows(first, count);
    for (int r = 0; r < count; r++) {
        const float* in = source + size_t(r) * size_t(view_.cols);
        if (view_.format == Format::kI8) take_row_whole(in, first + r);
        else take_row_in_blocks(in, first + r);
    }
}

void Matrix::take_row_in_blocks(const float* in, int row) {
    const int group = row / kLanes, lane = row % kLanes;
    for (int b = 0; b < view_.cols / kBlock; b++, in += kBlock) {
        const uint16_t half = float_to_half(largest(in, kBlock) / 127.0f);
        uint8_t* out = block(group, b);
        round_block(in, inverse(half_to_float(half)), out + 4 * lane);
        std::memcpy(out + 256 + 2 * lane, &half, 2);
    }
}

void Matrix::take_row_whole(const float* in, int row) {
    const int group = row / kLanes, lane = row % kLanes;
    const float scale = largest(in, view_.cols) / 127.0f, factor = inverse(scale);
    for (int b = 0; b < view_.cols / kBlock; b++) round_block(in + b * kBlock, factor, block(group, b) + 4 * lane);
    *row_scale(row) = scale;
}

void Matrix::row(int index, float* out) const {
    const int group = index / kLanes, lane = index % kLanes;
    for (int b = 0; b < view_.cols / kBlock; b++, out += kBlock) {
        const uint8_t* in = block(group, b);
        if (view_.format == Format::kQ4) {
            const float scale = half_to_float(half_at(in + 128 + 2 * lane));
            const float minimum = half_to_float(half_at(in + 144 + 2 * lane));
            for (int k = 0; k < 16; k++) {
                const int byte = in[32 * (k / 4) + 4 * lane + k % 4];
                out[k] = float(byte & 15) * scale + minimum;
                out[k + 16] = float(byte >> 4) * scale + minimum;
            }
        } else {
            const bool whole = view_.format == Format::kI8;
            const float scale = whole ? *row_scale(index) : half_to_float(half_at(in + 256 + 2 * lane));
            for (int k = 0; k < kBlock; k++) out[k] = float(int8_t(in[32 * (k / 4) + 4 * lane + k % 4])) * scale;
        }
    }
}

}  // namespace paceline
