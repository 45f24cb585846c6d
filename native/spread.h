// Spreads what stands out among a few floats over all of them, for the instruction set this file is compiled for.
#pragma once

#include <type_traits>

#include "vectors.h"

namespace paceline {
namespace {

// Sums and differences of features n apart.
template <int n> inline void butterflies(float* x, int d) {
    constexpr int W = V::width;
    if constexpr (n < W) {
        alignas(64) float signs[W];
        for (int i = 0; i < W; i++) signs[i] = i & n ? -1.0f : 1.0f;
        const V sign = V::load(signs);
        for (int i = 0; i < d; i += W) {
            const V a = V::load(x + i);
            (exchanged<n>(a) + a * sign).store(x + i);
        }
    } else {
        for (int i = 0; i < d; i += 2 * n)
            for (int j = i; j < i + n; j += W) {
                const V a = V::load(x + j), b = V::load(x + j + n);
                (a + b).store(x + j);
                (a - b).store(x + j + n);
            }
    }
}

// Every feature of a query or key, and every value of a block of activations or weights, becomes a sum of all of them with
// signs (a Hadamard transform of the largest power of two that divides d, from 16 to 256). None stands out then, so that
// rounding with one scale for all loses less; the product of two such vectors is what it was times that power of two.
inline void spread(float* x, int d) {
    const int size = d & -d;
    butterflies<1>(x, d);
    butterflies<2>(x, d);
    butterflies<4>(x, d);
    butterflies<8>(x, d);
    if (size >= 32) butterflies<16>(x, d);
    if (size >= 64) butterflies<32>(x, d);
    if (size >= 128) butterflies<64>(x, d);
    if (size >= 256) butterflies<128>(x, d);
}

// The same for a block of activations that stays in registers.
template <int count> inline void spread(V (&x)[count]) {
    constexpr int W = V::width;
    const auto within = [&](auto step) {
        constexpr int n = decltype(step)::value;
        alignas(64) float signs[W];
        for (int i = 0; i < W; i++) signs[i] = i & n ? -1.0f : 1.0f;
        const V sign = V::load(signs);
        for (int i = 0; i < count; i++) x[i] = exchanged<n>(x[i]) + x[i] * sign;
    };
    within(std::integral_constant<int, 1>());
    within(std::integral_constant<int, 2>());
    if constexpr (W > 4) within(std::integral_constant<int, 4>());
    static_assert(count == 4 || count == 8);
    // By constants: with loops of unknown length compilers take the vectors through memory.
    const auto among = [&](auto step) {
        constexpr int n = decltype(step)::value;
        for (int i = 0; i < count / 2; i++) {
            const int j = i / n * 2 * n + i % n;
            const V a = x[j], b = x[j + n];
            x[j] = a + b;
            x[j + n] = a - b;
        }
    };
    among(std::integral_constant<int, 1>());
    among(std::integral_constant<int, 2>());
    if constexpr (count > 4) among(std::integral_constant<int, 4>());
}

}  // namespace
}  // namespace paceline
