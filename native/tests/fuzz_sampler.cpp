// Random rows through the sampler, each compared with a plain reading of the rules.
#include "fuzz_sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "../sampler.h"

namespace paceline {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

float scaled(float x, float temperature) {
    const float most = std::numeric_limits<float>::max();
    return std::max(std::min(x / temperature, most), -most) + 0.0f;
}

// Tokens above -inf, best first, ties to the lowest id.
std::vector<uint32_t> ranked(const std::vector<float>& x, float temperature) {
    std::vector<uint32_t> order;
    for (uint32_t t = 0; t < x.size(); t++)
        if (x[t] > -kInf) order.push_back(t);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        return scaled(x[a], temperature) > scaled(x[b], temperature);
    });
    return order;
}

std::vector<float> row(std::mt19937& luck, size_t width) {
    std::normal_distribution<float> normal;
    const float scales[] = {1e-40f, 0.01f, 1.0f, 2.5f, 4.0f, 1e4f, 1e37f};
    const float scale = scales[luck() % 7];
    const bool ties = luck() % 4 == 0, holes = luck() % 4 == 0, broken = luck() % 10 == 0, sure = luck() % 10 == 0;
    std::vector<float> x(width);
    for (float& v : x) {
        v = normal(luck) * scale;
        if (ties) v = std::nearbyint(v / scale) * scale;
        if (holes && luck() % 3) v = -kInf;
        if (sure && luck() % 50 == 0) v = kInf;
        if (broken && luck() % 50 == 0) v = std::numeric_limits<float>::quiet_NaN();
    }
    return x;
}

void compare(std::mt19937& luck, Sampler& sampler, const std::vector<float>& x) {
    const int64_t width = int64_t(x.size());
    const float temperatures[] = {1e-9f, 0.3f, 0.8f, 1.0f, 3.0f, 1e6f, std::numeric_limits<float>::max()};
    SampleParams params;
    params.kind = SampleKind(luck() % 3);
    params.temperature = temperatures[luck() % 7];
    params.top_k = luck() % 2 ? width : 1 + int64_t(luck() % uint64_t(width));
    params.top_p = luck() % 2 ? 1.0 : 1e-6 + (luck() % 1000) / 1001.0;
    params.log_min_p = luck() % 2 ? -double(kInf) : -double(luck() % 100) / 10.0;
    params.seed = uint64_t(luck()) << 32 | luck();
    const int64_t position = int64_t(luck() % 100000);
    float top;
    const int64_t token = sampler.sample(x.data(), params, position, top);
    const bool broken = std::any_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
    const auto order = ranked(x, params.temperature);
    if (broken || order.empty()) {
        require(token == -1 && (broken ? std::isnan(top) : top == -kInf), "a row without a distribution has no token");
        return;
    }
    require(token >= 0 && token < width, "a token of the vocabulary");
    if (params.kind == SampleKind::kGreedy) {
        const auto best = std::max_element(x.begin(), x.end());
        require(token == best - x.begin() && top == *best, "the first of the best");
        return;
    }
    require(top == scaled(x[order[0]], params.temperature), "the best score");
    size_t size = order.size();
    if (params.kind == SampleKind::kTruncated) {
        const auto kept = size_t(sampler.support(x.data(), params));
        size = std::min<size_t>(size, size_t(params.top_k));
        while (double(scaled(x[order[size - 1]], params.temperature)) < double(top) + params.log_min_p) size--;
        require(params.top_p < 1.0 ? kept >= 1 && kept <= size : kept == size, "as many as the rules leave");
        for (size_t i = 0; i < kept; i++)
            require(sampler.token(int64_t(i)) == order[i] && sampler.score(int64_t(i)) == scaled(x[order[i]], params.temperature),
                    "the best tokens in order");
        size = kept;
    }
    const Noise noise(params.seed, position);
    int64_t winner = -1;
    float reached = -kInf;
    for (size_t i = 0; i < size; i++) {
        const float value = scaled(x[order[i]], params.temperature) + gumbel(noise.bits(order[i]));
        if (value > reached || (value == reached && order[i] < winner)) {
            reached = value;
            winner = order[i];
        }
    }
    require(token == winner, "the best of score and noise");
}

}  // namespace

void fuzz_sampler() {
    std::mt19937 luck(2024);
    for (int round = 0; round < 400; round++) {
        const size_t width = 1 + luck() % (round % 10 == 0 ? 9000 : round % 2 ? 40 : 400);
        Sampler sampler{int64_t(width)};
        for (int i = 0; i < 4; i++) compare(luck, sampler, row(luck, width));
    }
}

}  // namespace paceline
