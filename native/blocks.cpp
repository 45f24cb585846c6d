#include "blocks.h"

#include <cstring>

#include "halves.h"

namespace paceline {

namespace {

constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

float half(const uint8_t* p) { return float_of_half(half_at(p)); }

void scaled(Codes* out, float scale, float offset = -0.0f) {
    out->scale[0] = out->scale[1] = scale;
    out->offset[0] = out->offset[1] = offset;
}

// Sixteen bytes: columns 0 to 15 in the low halves, 16 to 31 in the high ones.
void nibbles(const uint8_t* packed, int middle, Codes* out) {
    for (int k = 0; k < kHalf; k++) {
        out->value[k] = int8_t((packed[k] & 15) - middle);
        out->value[k + kHalf] = int8_t((packed[k] >> 4) - middle);
    }
}

void levels(const uint8_t* packed, Codes* out) {
    for (int k = 0; k < kHalf; k++) {
        out->value[k] = kLevels[packed[k] & 15];
        out->value[k + kHalf] = kLevels[packed[k] >> 4];
    }
}

void read_q8_0(const uint8_t* in, Codes* out) {
    std::memcpy(out->value, in + 2, kBlock);
    scaled(out, half(in));
}

void read_q4_0(const uint8_t* in, Codes* out) {
    nibbles(in + 2, 8, out);
    scaled(out, half(in));
}

void read_q4_1(const uint8_t* in, Codes* out) {
    nibbles(in + 4, 0, out);
    scaled(out, half(in), half(in + 2));
}

// Four bytes with the highest bits of 32 codes, then their low halves.
void five_bits(const uint8_t* in, int middle, Codes* out) {
    nibbles(in + 4, middle, out);
    for (int k = 0; k < kBlock; k++) out->value[k] = int8_t(out->value[k] + 16 * (in[k / 8] >> k % 8 & 1));
}

void read_q5_0(const uint8_t* in, Codes* out) {
    five_bits(in + 2, 16, out);
    scaled(out, half(in));
}

void read_q5_1(const uint8_t* in, Codes* out) {
    five_bits(in + 4, 0, out);
    scaled(out, half(in), half(in + 2));
}

void read_iq4_nl(const uint8_t* in, Codes* out) {
    levels(in + 2, out);
    scaled(out, half(in));
}

void read_iq4_xs(const uint8_t* in, Codes* out) {
    const uint16_t high = half_at(in + 2);
    for (int b = 0; b < 8; b++) {
        const int scale = (in[4 + b / 2] >> 4 * (b % 2) & 15) | (high >> 2 * b & 3) << 4;
        levels(in + 8 + 16 * b, out + b);
        scaled(out + b, half(in) * float(scale - 32));
    }
}

void read_q2_k(const uint8_t* in, Codes* out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t* packed = in + 16 + 32 * (b / 4);
        for (int k = 0; k < kBlock; k++) out[b].value[k] = int8_t(packed[k] >> 2 * (b % 4) & 3);
        for (int h = 0; h < 2; h++) {
            out[b].scale[h] = half(in + 80) * float(in[2 * b + h] & 15);
            out[b].offset[h] = -half(in + 82) * float(in[2 * b + h] >> 4);
        }
    }
}

void read_q3_k(const uint8_t* in, Codes* out) {
    for (int b = 0; b < 8; b++) {
        const uint8_t* packed = in + 32 + 32 * (b / 4);
        for (int k = 0; k < kBlock; k++)
            out[b].value[k] = int8_t(((packed[k] >> 2 * (b % 4) & 3) | (in[k] >> b & 1) << 2) - 4);
        scaled(out + b, 0.0f);
        for (int h = 0; h < 2; h++) {
            const int i = 2 * b + h;
            const int scale = (in[96 + i % 8] >> 4 * (i / 8) & 15) | (in[104 + i % 4] >> 2 * (i / 4) & 3) << 4;
            out[b].scale[h] = half(in + 108) * float(scale - 32);
        }
    }
}

void scale_by_six_bits(const uint8_t* in, Codes* out) {
    uint8_t scales[8], offsets[8];
    six_bit_scales(in + 4, scales, offsets);
    for (int b = 0; b < 8; b++) scaled(out + b, half(in) * float(scales[b]), -half(in + 2) * float(offsets[b]));
}

void read_q4_k(const uint8_t* in, Codes* out) {
    for (int b = 0; b < 8; b++)
        for (int k = 0; k < kBlock; k++) out[b].value[k] = int8_t(in[16 + 32 * (b / 2) + k] >> 4 * (b % 2) & 15);
    scale_by_six_bits(in, out);
}

void read_q5_k(const uint8_t* in, Codes* out) {
    for (int b = 0; b < 8; b++)
        for (int k = 0; k < kBlock; k++)
            out[b].value[k] = int8_t((in[48 + 32 * (b / 2) + k] >> 4 * (b % 2) & 15) | (in[16 + k] >> b & 1) << 4);
    scale_by_six_bits(in, out);
}

void read_q6_k(const uint8_t* in, Codes* out) {
    for (int b = 0; b < 8; b++) {
        // 64 bytes hold 128 low halves, those of two runs of 32 in each nibble; 32 bytes hold their four pairs of bits.
        const uint8_t* low = in + 64 * (b / 4) + 32 * (b % 2);
        const uint8_t* high = in + 128 + 32 * (b / 4);
        for (int k = 0; k < kBlock; k++)
            out[b].value[k] = int8_t(((low[k] >> 4 * (b % 4 / 2) & 15) | (high[k] >> 2 * (b % 4) & 3) << 4) - 32);
        scaled(out + b, 0.0f);
        for (int h = 0; h < 2; h++) out[b].scale[h] = half(in + 208) * float(int8_t(in[192 + 2 * b + h]));
    }
}

constexpr BlockType kTypes[] = {
    {"Q8_0", 32, 34, true, true, read_q8_0},     {"Q4_0", 32, 18, true, true, read_q4_0},
    {"Q4_1", 32, 20, false, true, read_q4_1},    {"Q5_0", 32, 22, true, true, read_q5_0},
    {"Q5_1", 32, 24, false, true, read_q5_1},    {"IQ4_NL", 32, 18, true, true, read_iq4_nl},
    {"Q2_K", 256, 84, false, false, read_q2_k},  {"Q3_K", 256, 110, false, true, read_q3_k},
    {"Q4_K", 256, 144, false, true, read_q4_k},  {"Q5_K", 256, 176, false, true, read_q5_k},
    {"Q6_K", 256, 210, false, true, read_q6_k},  {"IQ4_XS", 256, 136, false, true, read_iq4_xs},
};

}  // namespace

const BlockType* block_type(const char* name) {
    for (const BlockType& type : kTypes)
        if (std::strcmp(type.name, name) == 0) return &type;
    return nullptr;
}

void six_bit_scales(const uint8_t* packed, uint8_t* scales, uint8_t* offsets) {
    for (int b = 0; b < 4; b++) {
        scales[b] = packed[b] & 63;
        offsets[b] = packed[4 + b] & 63;
        scales[4 + b] = uint8_t((packed[8 + b] & 15) | (packed[b] >> 6) << 4);
        offsets[4 + b] = uint8_t(packed[8 + b] >> 4 | (packed[4 + b] >> 6) << 4);
    }
}

}  // namespace paceline
