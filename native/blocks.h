// The blocks of GGUF files: whole numbers, and the scales and offsets that make weights of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace paceline {

constexpr int kHalf = kBlock / 2;

// kBlock weights: value * scale + offset, with a scale and an offset for each half. No offset is -0, which adds nothing.
struct Codes {
    int8_t value[kBlock];
    float scale[2];
    float offset[2];

    void floats(float* out) const {
        for (int half = 0; half < 2; half++)
            for (int k = half * kHalf; k < (half + 1) * kHalf; k++) out[k] = float(value[k]) * scale[half] + offset[half];
    }
};

struct BlockType {
    const char* name;
    int weights;      // of a block: kBlock or 8 * kBlock
    size_t bytes;     // of a block
    bool one_half;    // the only scale is an fp16 number, and there is no offset
    bool one_offset;  // both halves of kBlock weights have the same
    void (*read)(const uint8_t* in, Codes* out);  // out: weights / kBlock
};

// nullptr: no such type, or not one that is read here.
const BlockType* block_type(const char* name);

// The eight scales and eight offsets, 0 to 63, of a block of Q4_K or Q5_K, from its bytes 4 to 15.
void six_bit_scales(const uint8_t* packed, uint8_t* scales, uint8_t* offsets);

}  // namespace paceline
