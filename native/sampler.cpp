#include "sampler.h"

#include <cmath>
#include <limits>
#include <utility>

#include "sampler_math.h"

namespace paceline {
namespace {

constexpr double kNear = 5.0;              // tokens this close to the best score are tried first
constexpr uint32_t kTogether = 16;         // quads whose bits are made at once
constexpr int64_t kFew = 512;              // supports of up to this size are tried token by token
constexpr size_t kManyKeys = 2048;         // more of them are sorted by digits
// How far below the best score to look, in tries: however far it was, the support is the same.
constexpr double kWindows[] = {8.0, 11.0, 15.0, 20.0, 27.0, std::numeric_limits<double>::infinity()};

}  // namespace

Sampler::Sampler(int64_t width)
    : width_(width),
      groups_(uint32_t((width + kGroup - 1) / kGroup)),
      full_(uint32_t(width / kGroup)),
      peaks_((size_t(groups_) + 3) / 4 * 4, splat(-kInf)),
      active_(size_t(groups_) * 4 + kTogether),
      keys_(new uint64_t[size_t(width)]) {}

float Sampler::score(int64_t i) const { return score_of(keys_[size_t(i)]); }

// Look at a row once: the peaks of its quads, and the largest logit; NaN where there is one.
float Sampler::read(const float* x) {
    x_ = x;
    std::fill(tail_, tail_ + kGroup, -kInf);
    std::copy(x + size_t(full_) * kGroup, x + width_, tail_);
    Floats top = splat(-kInf);
    Mask good = {-1, -1, -1, -1};
    for (uint32_t g = 0; g < groups_; g++) {
        const float* p = group(g);
        peaks_[g] = largest(load(p), load(p + 4), load(p + 8), load(p + 12), good);
        top = larger(top, peaks_[g]);
    }
    good &= top == top;
    if (any(~good)) return std::numeric_limits<float>::quiet_NaN();
    return std::max(std::max(top[0], top[1]), std::max(top[2], top[3]));
}

uint32_t Sampler::first_at(float value) const {
    uint32_t g = 0;
    while (!any(peaks_[g] == value)) g++;
    const float* p = group(g);
    uint32_t lane = 0;
    while (p[lane] != value) lane++;
    return g * kGroup + lane;
}

// List the quads with a logit of at least `low`.
size_t Sampler::find_active(float low) {
    size_t count = 0;
    for (uint32_t g = 0; g < groups_; g += 4) {
        const Mask high[4] = {peaks_[g] >= low, peaks_[g + 1] >= low, peaks_[g + 2] >= low, peaks_[g + 3] >= low};
        if (!any((high[0] | high[1]) | (high[2] | high[3]))) continue;
        for (uint32_t i = 0; i < 4; i++) {
            // Four are written and as many counted as are meant: no branch that could be guessed wrongly.
            const uint32_t which = lanes(high[i]);
            const Words quads = kLanes.lists[which] + (g + i) * 4;
            std::memcpy(&active_[count], &quads, sizeof quads);
            count += kLanes.counts[which];
        }
    }
    return count;
}

// Keys of exactly the tokens whose score is at least `floor`, by token.
size_t Sampler::gather(float temperature, double floor) {
    const float low = lowest(temperature, floor);
    const size_t active = find_active(low);
    size_t count = 0;
    for (size_t a = 0; a < active; a++) {
        const float* p = quad(active_[a]);
        for (uint32_t j = 0; j < kQuad; j++) {
            if (!(p[j] >= low)) continue;
            const float score = scaled(p[j], temperature);
            if (double(score) >= floor) keys_[count++] = key_of(score, active_[a] * kQuad + j);
        }
    }
    return count;
}

// Sum of e^(score - top) over the row: weights in single precision, their sum in double, in one fixed order.
double Sampler::mass(float temperature, float top) {
    Doubles low[4] = {}, high[4] = {};
    for (uint32_t g = 0; g < groups_; g++) {
        const float* p = group(g);
        Floats x[4];
        for (int v = 0; v < 4; v++) x[v] = load(p + 4 * v) / temperature;
        if (top == kMost)
            for (Floats& score : x) score = score > kMost ? splat(kMost) : score;
        for (Floats& score : x) score -= top;
        exponential(x);
        for (int v = 0; v < 4; v++) add(x[v], low[v], high[v]);
    }
    const Doubles sum = ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
    return sum[0] + sum[1];
}

// Weights of keys [from, until), added up in order until they reach `target`: how many keys that took, counted from
// the first of all; 0 where they do not.
size_t Sampler::reach(size_t from, size_t until, float top, double target, double& sum) const {
    for (size_t at = from; at < until; at += 16) {
        alignas(16) float gaps[16] = {};
        const size_t count = std::min<size_t>(16, until - at);
        for (size_t i = 0; i < count; i++) gaps[i] = score_of(keys_[at + i]) - top;
        Floats weights[4];
        std::memcpy(weights, gaps, sizeof weights);
        exponential(weights);
        std::memcpy(gaps, weights, sizeof gaps);
        for (size_t i = 0; i < count; i++) {
            sum += double(gaps[i]);
            if (sum >= target) return at + i + 1;
        }
    }
    return 0;
}

// Keys [done, until) become the next smallest in order, of those in [done, count).
void Sampler::order(size_t done, size_t until, size_t count) {
    uint64_t* keys = keys_.get();
    if (until < count) std::nth_element(keys + done, keys + until, keys + count);
    std::sort(keys + done, keys + until);
}

// All keys in order. They come by token and every pass keeps what is equal in place: only scores need sorting.
void Sampler::radix_sort(size_t count) {
    if (!spare_) spare_.reset(new uint64_t[size_t(width_)]);
    uint32_t places[4][256] = {};
    for (size_t i = 0; i < count; i++)
        for (int d = 0; d < 4; d++) places[d][keys_[i] >> (32 + 8 * d) & 255]++;
    for (int d = 0; d < 4; d++) {
        uint32_t next = 0;
        for (uint32_t& place : places[d]) next += std::exchange(place, next);
        for (size_t i = 0; i < count; i++) spare_[places[d][keys_[i] >> (32 + 8 * d) & 255]++] = keys_[i];
        keys_.swap(spare_);
    }
}

// The support of the row that was read, best first, in keys_; `top` is its best score.
int64_t Sampler::truncate(const SampleParams& params, float top) {
    const bool ranked = params.top_k < width_, nucleus = params.top_p < 1.0;
    // What top-p shares out is what top-k left: without top-k, all of it.
    const bool whole = nucleus && !ranked;
    const double total = whole ? mass(params.temperature, top) : 0.0;
    // min-p alone bounds how deep it is of use to look; but with top-k and top-p both on, the mass needs the top k.
    const double deepest = nucleus && ranked ? std::numeric_limits<double>::infinity() : -params.log_min_p;
    const double least = double(top) + params.log_min_p;
    for (const double window : kWindows) {
        const double depth = std::min(window, deepest);
        const size_t count = gather(params.temperature, double(top) - depth);
        const bool complete = depth >= deepest;
        if (!complete && !whole && int64_t(count) < params.top_k) continue;
        const size_t limit = size_t(std::min<int64_t>(params.top_k, int64_t(count)));
        // A nucleus is mostly a few of the tokens in sight: they are brought into order as far as it reaches.
        size_t sorted = whole ? std::min<size_t>(limit, 64) : limit;
        if (count > kManyKeys && (whole || limit > kManyKeys / 4)) {
            double sum = 0.0;
            if (whole && !complete && !reach(0, count, top, params.top_p * total * (1.0 - 1e-9), sum)) continue;
            radix_sort(count);
            sorted = limit;
        } else {
            order(0, sorted, count);
        }
        size_t size = limit;
        if (nucleus) {
            double target = params.top_p * total, sum = 0.0;
            if (!whole) {
                reach(0, limit, top, std::numeric_limits<double>::infinity(), sum);
                target = params.top_p * std::exchange(sum, 0.0);
            }
            size_t reached = reach(0, sorted, top, target, sum);
            while (!reached && sorted < limit) {
                const size_t next = std::min(limit, sorted * 4);
                order(sorted, next, count);
                reached = reach(sorted, next, top, target, sum);
                sorted = next;
            }
            if (!reached && whole && !complete) continue;
            if (reached) size = std::min(size, reached);
        }
        size_t kept = 0;
        while (kept < size && !(double(score_of(keys_[kept])) < least)) kept++;
        return int64_t(kept);
    }
    return 0;  // not reached: the last window is complete
}

int64_t Sampler::support(const float* x, const SampleParams& params) {
    const float top = read(x);
    return top > -kInf ? truncate(params, scaled(top, params.temperature)) : 0;
}

int64_t Sampler::sample(const float* x, const SampleParams& params, int64_t position, float& top) {
    top = read(x);
    if (!(top > -kInf)) return -1;
    if (params.kind == SampleKind::kGreedy) return int64_t(first_at(top));
    const Noise noise(params.seed, position);
    if (params.kind == SampleKind::kOpen) {
        const uint32_t first = first_at(top);
        top = scaled(top, params.temperature);
        return sample_noisy(noise, params.temperature, top, first, std::numeric_limits<uint64_t>::max());
    }
    top = scaled(top, params.temperature);
    const int64_t kept = truncate(params, top);
    if (kept <= kFew) return sample_few(noise, top, kept);
    return sample_noisy(noise, params.temperature, top, uint32_t(keys_[0]), keys_[size_t(kept) - 1]);
}

// The best of score and noise among the first `kept` keys.
int64_t Sampler::sample_few(const Noise& noise, float top, int64_t kept) const {
    const double room = slack(top);
    Best best{-kInf, 0};
    for (int64_t i = 0; i < kept; i++) {
        const float score = score_of(keys_[size_t(i)]);
        if (double(score) + kGumbelMax + room < double(best.value)) break;
        const uint32_t token = uint32_t(keys_[size_t(i)]);
        offer(token, score, noise.bits(token), room, best);
    }
    return int64_t(best.token);
}

// The best of score and noise among all tokens with keys up to `last`; `first` has the best score. Noise is bounded:
// what tokens close to the best come to tells how lucky the others must be, which their bits say without a logarithm.
int64_t Sampler::sample_noisy(const Noise& noise, float temperature, float top, uint32_t first, uint64_t last) {
    const double room = slack(top);
    Best best{-kInf, first};
    offer(first, top, noise.bits(first), room, best);
    const auto within_luck = [&] { return lowest(temperature, double(best.value) - kGumbelMax - room); };
    const float near = lowest(temperature, double(top) - kNear);
    const size_t close = find_active(near);
    if (close > size_t(groups_) * 2) {  // a flat row: everything at once
        const float low = within_luck();
        sweep(noise, temperature, low, find_active(low), double(top), room, last, best);
        return int64_t(best.token);
    }
    sweep(noise, temperature, near, close, double(top), room, last, best);
    const float low = within_luck();
    if (low < near) sweep(noise, temperature, low, find_active(low), double(top) - kNear, room, last, best);
    return int64_t(best.token);
}

// Let the tokens with logits of at least `low` try, which are in the `active` quads that were found last. Those not yet
// tried have scores of at most `cap`.
void Sampler::sweep(const Noise& noise, float temperature, float low, size_t active, double cap, double room,
                    uint64_t last, Best& best) {
    std::fill_n(active_.begin() + int64_t(active), kTogether, 0u);  // makes up the last few; not looked at
    uint32_t limit = luckiest(double(best.value) - cap - room);
    for (size_t a = 0; a < active; a += kTogether) {
        Words bits[kTogether / 4][4];
        noise.bits<kTogether / 4>(&active_[a], bits);
        for (uint32_t n = 0; n < kTogether; n += 4) {
            const Words* w = bits[n / 4];
            if (!any((w[0] <= limit) | (w[1] <= limit) | (w[2] <= limit) | (w[3] <= limit))) continue;
            const float before = best.value;
            for (uint32_t q = 0; q < 4 && a + n + q < active; q++) {
                const uint32_t start = active_[a + n + q] * kQuad;
                const float* p = quad(active_[a + n + q]);
                for (uint32_t j = 0; j < kQuad; j++) {
                    if (w[j][q] > limit || !(p[j] >= low)) continue;
                    const float score = scaled(p[j], temperature);
                    if (key_of(score, start + j) <= last) offer(start + j, score, w[j][q], room, best);
                }
            }
            if (best.value > before) limit = luckiest(double(best.value) - cap - room);
        }
    }
}

void Sampler::offer(uint32_t token, float score, uint32_t bits, double room, Best& best) const {
    if (double(score) + double(bound_(bits)) + room < double(best.value)) return;
    const float value = score + gumbel(bits);
    if (value > best.value || (value == best.value && token < best.token)) best = {value, token};
}

}  // namespace paceline
