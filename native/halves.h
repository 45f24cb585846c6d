// fp16 numbers of files and packed matrices, for code that is not in a hurry.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace paceline {

inline float float_of_half(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float(mantissa) * 5.9604644775390625e-08f);  // 2^-24
    const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline uint16_t half_of_float(float f) {
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

inline uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}

}  // namespace paceline
