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

}  // namespace

void Matrix::Free::operator()(uint8_t* p) const { std::free(p); }

Matrix::Matrix(Format format, int rows, int cols) {
    if (rows <= 0 || cols <= 0 || rows % kLanes || cols % kBlock)
        throw std::invalid_argument("a packed matrix needs rows in eights and columns in blocks of 32, got " +
                                    std::to_string(rows) + " x " + std::to_string(cols));
    size_ = size_t(rows / kLanes) * size_t(cols / kBlock) * block_bytes(format);
    const size_t whole = (size_ + kReadAhead + 63) / 64 * 64;
    data_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, whole)));
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get() + size_, 0, whole - size_);
    view_ = Packed{format, rows, cols, data_.get()};
}

uint8_t* Matrix::block(int group, int b) const {
    return data_.get() + group * view_.group_bytes() + size_t(b) * block_bytes(view_.format);
}

void Matrix::take_blocks(const uint8_t* source, size_t stride, const char* type, int first, int count) {
    const std::string kind = type;
    const bool four = kind == "Q4_0" || kind == "Q4_1";
    if (!four && kind != "Q8_0") throw std::invalid_argument("blocks of type " + kind + " cannot be packed");
    if (four != (view_.format == Format::kQ4))
        throw std::invalid_argument("blocks of type " + kind + " do not fit a matrix of the other width");
    if (first < 0 || count < 0 || first % kLanes || count % kLanes || first + count > view_.rows)
        throw std::invalid_argument("rows to pack must come in eights and lie inside the matrix");
    const size_t block_size = kind == "Q4_0" ? 18 : kind == "Q4_1" ? 20 : 34;
    const int blocks = view_.cols / kBlock;
    if (stride < blocks * block_size) throw std::invalid_argument("a source row is too short for its blocks");
    for (int r = 0; r < count; r++) {
        const int group = (first + r) / kLanes, lane = (first + r) % kLanes;
        const uint8_t* in = source + size_t(r) * stride;
        for (int b = 0; b < blocks; b++, in += block_size) {
            uint8_t* out = block(group, b);
            if (four) {
                // A source byte k holds columns k (low) and k + 16 (high): exactly the halves the kernel wants.
                const uint8_t* nibbles = in + (kind == "Q4_0" ? 2 : 4);
                for (int l = 0; l < 4; l++) std::memcpy(out + 32 * l + 4 * lane, nibbles + 4 * l, 4);
                std::memcpy(out + 128 + 2 * lane, in, 2);
                if (kind == "Q4_1") {
                    std::memcpy(out + 144 + 2 * lane, in + 2, 2);
                } else {
                    uint16_t scale;
                    std::memcpy(&scale, in, 2);
                    const uint16_t minimum = float_to_half(-8.0f * half_to_float(scale));
                    std::memcpy(out + 144 + 2 * lane, &minimum, 2);
                }
            } else {
                for (int l = 0; l < 8; l++) std::memcpy(out + 32 * l + 4 * lane, in + 2 + 4 * l, 4);
                std::memcpy(out + 256 + 2 * lane, in, 2);
            }
        }
    }
}

void Matrix::take_floats(const float* source, int first, int count) {
    if (view_.format != Format::kQ8) throw std::invalid_argument("floats are packed into 8-bit matrices only");
    if (first < 0 || count < 0 || first % kLanes || count % kLanes || first + count > view_.rows)
        throw std::invalid_argument("rows to pack must come in eights and lie inside the matrix");
    for (int r = 0; r < count; r++) {
        const int group = (first + r) / kLanes, lane = (first + r) % kLanes;
        const float* in = source + size_t(r) * view_.cols;
        for (int b = 0; b < view_.cols / kBlock; b++, in += kBlock) {
            uint8_t* out = block(group, b);
            float largest = 0.0f;
            for (int k = 0; k < kBlock; k++) largest = std::fmax(largest, std::fabs(in[k]));
            const uint16_t half = float_to_half(largest / 127.0f);
            const float scale = half_to_float(half);
            const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            for (int k = 0; k < kBlock; k++) {
                const float value = std::fmin(std::fmax(std::nearbyint(in[k] * inverse), -127.0f), 127.0f);
                out[32 * (k / 4) + 4 * lane + k % 4] = uint8_t(int8_t(value));
            }
            std::memcpy(out + 256 + 2 * lane, &half, 2);
        }
    }
}

void Matrix::row(int index, float* out) const {
    const int group = index / kLanes, lane = index % kLanes;
    for (int b = 0; b < view_.cols / kBlock; b++, out += kBlock) {
        const uint8_t* in = block(group, b);
        uint16_t half;
        if (view_.format == Format::kQ4) {
            std::memcpy(&half, in + 128 + 2 * lane, 2);
            const float scale = half_to_float(half);
            std::memcpy(&half, in + 144 + 2 * lane, 2);
            const float minimum = half_to_float(half);
            for (int k = 0; k < 16; k++) {
                const int byte = in[32 * (k / 4) + 4 * lane + k % 4];
                out[k] = float(byte & 15) * scale + minimum;
                out[k + 16] = float(byte >> 4) * scale + minimum;
            }
        } else {
            std::memcpy(&half, in + 256 + 2 * lane, 2);
            const float scale = half_to_float(half);
            for (int k = 0; k < kBlock; k++) out[k] = float(int8_t(in[32 * (k / 4) + 4 * lane + k % 4])) * scale;
        }
    }
}

}  // namespace paceline
