// Weights to 8 bits, for the instruction set this file is compiled for.
#pragma once

#include "vectors.h"

namespace paceline {
namespace {

// Kernels::round_block.
void round_block(float* x, const float* scale, const float* passing, uint8_t* out) {
    constexpr int W = V::width, N = kLanes / W;
    const V top = V::set(127.0f), bottom = V::set(-127.0f);
    float inverse[kLanes], rounded[kLanes];
    for (int r = 0; r < kLanes; r++) inverse[r] = scale[r] > 0.0f ? 1.0f / scale[r] : 0.0f;
    for (int i = 0; i < kBlock; i++, x += kLanes) {
        V error[N];
        for (int n = 0; n < N; n++) {
            const V value = V::load(x + n * W);
            const V level = min(max(round(value * V::load(inverse + n * W)), bottom), top);
            level.store(rounded + n * W);
            error[n] = value - level * V::load(scale + n * W);
        }
        for (int r = 0; r < kLanes; r++) out[32 * (i / 4) + 4 * r + i % 4] = uint8_t(int8_t(rounded[r]));
        if (passing == nullptr) continue;
        for (int j = i + 1; j < kBlock; j++) {
            const V share = V::set(passing[i * kBlock + j]);
            for (int n = 0; n < N; n++) {
                float* at = x + (j - i) * kLanes + n * W;
                (V::load(at) - error[n] * share).store(at);
            }
        }
    }
}

}  // namespace
}  // namespace paceline
