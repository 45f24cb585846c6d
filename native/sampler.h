// From a row of logits to a token: the best one, or the best of score and noise over what top-k, top-p and min-p left.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "noise.h"

namespace paceline {

typedef float Floats __attribute__((vector_size(16)));

constexpr uint32_t kGroup = 4 * kQuad;  // tokens that are looked at together

enum class SampleKind : uint8_t { kGreedy, kTruncated, kOpen };

// What one row asks for.
struct SampleParams {
    SampleKind kind = SampleKind::kGreedy;
    float temperature = 1.0f;  // above 0
    int64_t top_k = 1;         // at least 1; the width or more: off
    double top_p = 1.0;        // 1: off
    double log_min_p = 0.0;    // at most 0; -inf: off
    uint64_t seed = 0;
};

// Scratch for rows of one width. What comes out for a row is a function of that row and its parameters alone.
// One caller at a time.
class Sampler {
  public:
    explicit Sampler(int64_t width);

    int64_t width() const { return width_; }

    // The token sampled from logits x [width] at an absolute position, and the row's best score (of a greedy row, its
    // best logit). -1 where the row has no distribution: `top` is then NaN (some logit is) or -inf (all are).
    int64_t sample(const float* x, const SampleParams& params, int64_t position, float& top);

    // How many tokens are left of a row that is kTruncated, 0 where it has no distribution. Then token(i) and score(i)
    // are the i-th best, ties to the lowest id.
    int64_t support(const float* x, const SampleParams& params);
    int64_t token(int64_t i) const { return int64_t(uint32_t(keys_[size_t(i)])); }
    float score(int64_t i) const;

  private:
    struct Best {
        float value;
        uint32_t token;
    };

    const float* group(uint32_t g) const { return g < full_ ? x_ + size_t(g) * kGroup : tail_; }
    const float* quad(uint32_t q) const { return group(q / kQuad) + q % kQuad * kQuad; }
    float read(const float* x);
    uint32_t first_at(float value) const;
    size_t find_active(float low);
    size_t gather(float temperature, double floor);
    double mass(float temperature, float top);
    size_t reach(size_t from, size_t until, float top, double target, double& sum) const;
    int64_t truncate(const SampleParams& params, float top);
    void order(size_t done, size_t until, size_t count);
    void radix_sort(size_t count);
    int64_t sample_few(const Noise& noise, float top, int64_t kept) const;
    int64_t sample_noisy(const Noise& noise, float temperature, float top, uint32_t first, uint64_t last);
    void sweep(const Noise& noise, float temperature, float low, size_t active, double cap, double room, uint64_t last,
               Best& best);
    void offer(uint32_t token, float score, uint32_t bits, double room, Best& best) const;

    int64_t width_;
    uint32_t groups_, full_;          // groups of kGroup tokens, and those that are whole
    const float* x_ = nullptr;        // the row being worked on
    alignas(16) float tail_[kGroup];  // its last group, filled up with -inf
    GumbelBound bound_;
    std::vector<Floats> peaks_;       // the largest logit of each quad, four quads a group; groups made up to fours
    std::vector<uint32_t> active_;    // quads found by find_active, with room for a few more
    std::unique_ptr<uint64_t[]> keys_, spare_;  // score and token as one integer; the best is the smallest
};

}  // namespace paceline
