// Scores, which noise is added to: logits over the temperature, and what is known of a comparison before there is noise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace paceline {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

// logit / temperature, finite where the logit is above -inf, and never -0: equal scores have equal bits.
inline float scaled(float x, float temperature) {
    const float score = x / temperature;
    return std::max(std::min(score, kMost), -kMost) + 0.0f;
}

// A floor for logits that lets every score of at least `floor` pass, and little else; above -inf.
inline float lowest(float temperature, double floor) {
    if (floor <= -double(kMost)) {
        return -kMost;  // scores end there, however far below it a logit would take them
    }
    double low = floor * double(temperature);
    low -= std::fabs(low) * 1e-6 + double(std::max(temperature, 1.0f)) * 3e-45;
    return float(std::min(std::max(low, -double(kMost)), double(kMost)));
}

// What rounding may add to a comparison of scores with noise within reach of `top`, with room to spare.
inline double slack(float top) { return 0.01 + (std::fabs(double(top)) + 32.0) * 0x1p-20; }

// Noise of at least `needed` has at most this many bits.
inline uint32_t luckiest(double needed) {
    if (!(needed > -5.0)) return 0xFFFFFFFFu;
    const double bits = std::ceil(-std::expm1(-std::exp(-needed)) * 0x1p32) + 1.0;
    return uint32_t(std::min(bits, 4294967295.0));
}

}  // namespace paceline
