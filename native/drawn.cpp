#include "drawn.h"

#include <algorithm>

#include "scores.h"

namespace paceline {
namespace {

constexpr double kNear = 5.0;       // tokens this close to the likeliest are tried first,
constexpr int kFew = 128;           // so many at most
constexpr uint32_t kTogether = 16;  // runs whose noise is made at once
constexpr int kStride = 16;         // tokens that are passed over at once

}  // namespace

// What a search knows so far.
struct Drawn::Search {
    const float* logits;
    int begin, end;
    float temperature;
    const Noise& noise;
    double room;
    Leader best;
};

Drawn::Drawn(int width, const std::vector<int64_t>& ids) {
    for (int token = 0; token < width; token++) {
        ids_.push_back(ids.empty() ? uint32_t(token) : uint32_t(ids[size_t(token)]));
        const uint32_t quad = ids_.back() / kQuad;
        if (quads_.empty() || quads_.back() != quad) {
            quads_.push_back(quad);
            starts_.push_back(token);
        }
        run_of_.push_back(uint32_t(quads_.size()) - 1);
    }
    starts_.push_back(width);
    quads_.resize(quads_.size() + kTogether);  // makes up the last few; not looked at
}

Leader Drawn::best(const float* logits, int begin, int end, Leader likeliest, float temperature, const Noise& noise) const {
    if (begin >= end || !(likeliest.score > -kInf)) return likeliest;
    const float top = scaled(likeliest.score, temperature);
    Search now{logits, begin, end, temperature, noise, slack(top), likeliest};
    now.best.score = top + gumbel(noise.bits(ids_[size_t(likeliest.token)]));
    const bool all = try_near(now, lowest(temperature, double(top) - kNear));
    // What the likeliest have come to says how lucky the others must be, which their bits tell without a logarithm.
    try_lucky(now, double(top) - (all ? kNear : 0.0));
    return now.best;
}

float Drawn::score(float logit, uint32_t id, float least, float temperature, const Noise& noise) const {
    if (!(logit > -kInf)) return -kInf;
    const float value = scaled(logit, temperature);
    if (double(value) + kGumbelMax + slack(value) < double(least)) return least;
    const uint32_t bits = noise.bits(id);
    if (double(value) + double(bound_(bits)) + slack(value) < double(least)) return least;
    return value + gumbel(bits);
}

// Let the tokens with logits of at least `low` try, as far as they are few. Whether that were all of them.
bool Drawn::try_near(Search& now, float low) const {
    int tried = 0;
    for (int at = now.begin; at < now.end; at += kStride) {
        const int until = std::min(at + kStride, now.end);
        bool high = until - at < kStride;
        if (!high)  // lane by lane, which compilers turn into a few vector instructions
            for (int lane = 0; lane < kStride; lane++) high |= now.logits[at + lane] >= low;
        if (!high) continue;
        for (int token = at; token < until; token++) {
            if (!(now.logits[token] >= low)) continue;
            if (tried++ == kFew) return false;
            offer(now, token, now.noise.bits(ids_[size_t(token)]));
        }
    }
    return true;
}

// Let those try that are lucky enough to be better than the best, however good they are: logits are at most `cap`, over
// the temperature.
void Drawn::try_lucky(Search& now, double cap) const {
    const auto needed = [&] { return luckiest(double(now.best.score) - cap - now.room); };
    uint32_t limit = needed();
    const uint32_t last = run_of_[size_t(now.end) - 1];
    for (uint32_t run = run_of_[size_t(now.begin)]; run <= last; run += kTogether) {
        Words bits[kTogether / 4][4];
        now.noise.bits<kTogether / 4>(&quads_[run], bits);
        for (uint32_t n = 0; n < kTogether; n++) {
            const Words* w = bits[n / 4];
            if (n % 4 == 0) {
                const Words lucky = (Words)((w[0] <= limit) | (w[1] <= limit) | (w[2] <= limit) | (w[3] <= limit));
                uint64_t halves[2];
                std::memcpy(halves, &lucky, sizeof halves);
                if (!(halves[0] | halves[1])) {
                    n += 3;
                    continue;
                }
            }
            if (run + n > last) return;
            const int until = std::min(starts_[run + n + 1], now.end);
            for (int token = std::max(starts_[run + n], now.begin); token < until; token++) {
                const uint32_t word = w[ids_[size_t(token)] % kQuad][n % 4];
                if (word > limit) continue;
                const float before = now.best.score;
                offer(now, token, word);
                if (now.best.score > before) limit = needed();
            }
        }
    }
}

void Drawn::offer(Search& now, int token, uint32_t bits) const {
    if (!(now.logits[token] > -kInf)) return;
    const float value = scaled(now.logits[token], now.temperature);
    if (double(value) + double(bound_(bits)) + now.room < double(now.best.score)) return;
    const float score = value + gumbel(bits);
    if (score > now.best.score || (score == now.best.score && token < now.best.token)) now.best = {score, token};
}

}  // namespace paceline
