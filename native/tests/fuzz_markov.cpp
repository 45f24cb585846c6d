// Random Markov heads over random blocks: odd vocabularies, any number of lines, slots and threads, ties, tokens that are
// ruled out, and sizes that must be refused.
#include "fuzz_markov.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "../markov.h"

namespace paceline {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
// Rounded to 8 bits, a block of kBlock numbers is off by half a step of 1/127 of its largest in each of them; twice that.
constexpr double kRounding = 0.045;

std::mt19937 luck(2026);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(luck); }

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

template <class Make> void refused(Make&& make, const char* what) {
    try {
        make();
    } catch (const std::invalid_argument&) {
        return;
    }
    require(false, what);
}

int up_to_lanes(int rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

std::shared_ptr<Matrix> matrix(int rows, int cols, float scale) {
    auto out = std::make_shared<Matrix>(pick(0, 1) ? Format::kI8 : Format::kQ8, up_to_lanes(rows), cols, pick(0, 1) == 1);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<float> values(size_t(out->view().rows) * size_t(cols));
    for (float& v : values) v = normal(luck) * scale;
    out->take_floats(values.data(), 0, out->view().rows);
    return out;
}

// A head with everything that it is asked about, read plainly.
struct Head {
    int tokens, width, rank;
    std::shared_ptr<Matrix> first, second;
    std::vector<int64_t> ids;
    Confidence confidence;

    size_t features() const { return confidence.hidden.size(); }

    // How likely the token after `before` is to be accepted, in double.
    double chance(const float* hidden, int64_t before) const {
        double sure = 0.0, squares = 0.0;
        for (size_t i = 0; i < features(); i++) {
            sure += double(hidden[i]) * double(confidence.hidden[i]);
            squares += double(hidden[i]) * double(hidden[i]);
        }
        sure /= std::sqrt(squares / double(features()) + double(confidence.eps));
        std::vector<float> x(static_cast<size_t>(rank));
        first->row(int(before), x.data());
        for (size_t i = 0; i < confidence.token.size(); i++) sure += double(x[i]) * double(confidence.token[i]);
        return 1.0 / (1.0 + std::exp(-sure - double(confidence.bias)));
    }

    int64_t target(int token) const { return ids.empty() ? token : ids[size_t(token)]; }

    // What the token before makes of each token: in double, of the matrices' own numbers; `slack`: what rounding can do.
    std::vector<double> bias(int64_t before, double* slack) const {
        std::vector<float> x(static_cast<size_t>(rank)), w(x.size());
        first->row(int(before), x.data());
        std::vector<double> out;
        *slack = 0.0;
        for (int token = 0; token < width; token++) {
            second->row(token, w.data());
            double sum = 0.0, off = 0.0;
            for (int b = 0; b < rank; b += kBlock) {
                double xx = 0.0, ww = 0.0;
                for (int i = b; i < b + kBlock; i++) {
                    sum += double(x[size_t(i)]) * double(w[size_t(i)]);
                    xx += double(x[size_t(i)]) * double(x[size_t(i)]);
                    ww += double(w[size_t(i)]) * double(w[size_t(i)]);
                }
                off += std::sqrt(xx * ww);
            }
            out.push_back(sum);
            *slack = std::fmax(*slack, kRounding * off + 1e-5 * std::fabs(sum));
        }
        return out;
    }
};

Head head() {
    Head out;
    const bool same = pick(0, 1) == 1;
    out.width = pick(0, 3) ? pick(1, 70) : pick(200, 400);
    out.tokens = same ? out.width + pick(0, 9) : pick(1, 90);
    out.rank = kBlock * pick(1, 4);
    const float scale = pick(0, 3) ? 0.4f : 0.0f;  // no bias at all: ties are ties
    out.first = matrix(out.tokens, out.rank, 1.0f);
    out.second = matrix(out.width + pick(0, 20), out.rank, scale);
    for (int token = 0; token < out.width && !same; token++) out.ids.push_back(pick(0, out.tokens - 1));
    std::normal_distribution<float> normal(0.0f, 0.3f);
    out.confidence.hidden.resize(size_t(pick(1, 40)));
    out.confidence.token.resize(pick(0, 1) ? size_t(out.rank) : 0);
    out.confidence.bias = normal(luck);
    out.confidence.eps = 1e-5f;
    for (float& v : out.confidence.hidden) v = normal(luck);
    for (float& v : out.confidence.token) v = normal(luck);
    return out;
}

// Of all kinds of logits: ties, tokens that are ruled out, whole rows of those.
std::vector<float> logits(size_t rows, size_t width) {
    std::normal_distribution<float> normal(0.0f, 2.0f);
    std::vector<float> out(rows * width);
    for (size_t row = 0; row < rows; row++) {
        const int kind = pick(0, 5);
        for (size_t i = row * width; i < (row + 1) * width; i++) {
            out[i] = normal(luck);
            if (kind == 1) out[i] = std::nearbyint(out[i]);
            if ((kind == 2 && luck() % 3) || kind == 3) out[i] = -kInf;
            if (kind == 4) out[i] = 7.0f;
        }
    }
    return out;
}

// Tokens beside the draft vocabulary, or none.
struct More {
    std::vector<float> scores;
    std::vector<int64_t> ids;
    int width;

    Further view(size_t cell = 0, size_t line = 0) const {
        return {scores.data() + cell * size_t(width), ids.data() + line * size_t(width), width};
    }
};

More more(const Head& one, int lines, int slots) {
    const int width = pick(0, 2) ? pick(1, 20) : 0;
    More out{logits(size_t(lines * slots), size_t(width)), {}, width};
    for (int i = 0; i < lines * width; i++) out.ids.push_back(pick(0, one.tokens - 1));
    return out;
}

// A slot's token is the likeliest after the one that was picked before it; where nothing but the logits count, the very
// first of the largest, those of the draft vocabulary before the others.
void check_slot(const Head& one, const float* base, const Further& further, int64_t before, int64_t token, Draw draw) {
    double slack = 0.0;
    const std::vector<double> bias = one.bias(before, &slack);
    double best = -INFINITY, found = -INFINITY;
    int64_t likeliest = one.target(0);
    bool there = false;
    const auto look = [&](double score, int64_t id) {
        if (score > best) {
            best = score;
            likeliest = id;
        }
        if (id != token) return;
        there = true;
        found = std::fmax(found, score);
    };
    const Noise noise(draw.seed, draw.position);
    const auto score = [&](double logit, int64_t id) {
        return draw.temperature > 0.0f ? logit / double(draw.temperature) + double(gumbel(noise.bits(uint32_t(id)))) : logit;
    };
    for (int i = 0; i < one.width; i++) look(score(double(base[i]) + bias[size_t(i)], one.target(i)), one.target(i));
    for (int i = 0; i < further.width; i++) look(score(double(further.logits[i]), further.ids[i]), further.ids[i]);
    if (draw.temperature > 0.0f) slack = slack / double(draw.temperature) + 1e-4;  // scores are floats
    require(there, "a token that can be drafted");
    require(found == best || found >= best - 2.0 * slack, "the likeliest token, but for rounding");
    require(slack > 0.0 || token == likeliest, "of ties the first");
}

void compare(const Kernels* table) {
    const Head one = head();
    const int lines = pick(1, 19), slots = pick(1, 8);
    const size_t wide = size_t(one.width), cells = size_t(lines * slots);
    const auto base = logits(cells, wide);
    const More beside = more(one, lines, slots);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<float> hidden(cells * one.features()), least(static_cast<size_t>(lines), 0.0f), expected_chances;
    for (float& v : hidden) v = normal(luck);
    std::vector<int64_t> previous(static_cast<size_t>(lines)), expected;
    for (int64_t& token : previous) token = pick(0, one.tokens - 1);
    std::vector<Draw> draws(static_cast<size_t>(lines));
    for (Draw& draw : draws)
        if (pick(0, 1)) draw = {std::exp(normal(luck)), luck(), pick(0, 1 << 20)};
    for (int threads : {1, 3}) {
        Markov markov(one.first, one.second, one.width, one.ids, one.confidence, table, threads);
        require(markov.width() == one.width && markov.target_tokens() >= one.tokens, "its sizes");
        require(markov.hidden() == int(one.features()), "its features");
        // A smaller block first, so that the large one has to make room.
        std::vector<int64_t> tokens(1, -1);
        std::vector<float> chances(1, -1.0f);
        const auto drafted = [&](int wide_lines, int long_slots, const std::vector<float>& wanted) {
            return markov.best(base.data(), hidden.data(), beside.view(), wide_lines, long_slots, previous.data(), draws.data(),
                               wanted.data(), tokens.data(), chances.data());
        };
        require(drafted(1, 1, least) == 1, "one slot");
        require(markov.best(nullptr, nullptr, {}, 0, slots, nullptr, nullptr, nullptr, nullptr, nullptr) == 0, "no lines");
        require(markov.best(nullptr, nullptr, {}, lines, 0, nullptr, nullptr, nullptr, nullptr, nullptr) == 0, "no slots");
        tokens.assign(cells, -1);
        chances.assign(cells, -1.0f);
        require(drafted(lines, slots, least) == slots, "every slot where nobody is too unlikely");
        if (expected.empty()) expected = tokens, expected_chances = chances;
        require(tokens == expected && chances == expected_chances, "threads change nothing");
        for (int line = 0; line < lines && threads == 1; line++) {
            std::vector<int64_t> alone(static_cast<size_t>(slots), -1);
            std::vector<float> sure(alone.size());
            const size_t at = size_t(line * slots);
            markov.best(base.data() + at * wide, hidden.data() + at * one.features(), beside.view(at, size_t(line)), 1, slots,
                        &previous[size_t(line)], &draws[size_t(line)], least.data(), alone.data(), sure.data());
            for (size_t slot = 0; slot < alone.size(); slot++)
                require(alone[slot] == tokens[at + slot] && sure[slot] == chances[at + slot], "a line's tokens are its own");
        }
        // Ends behind the slot with which no line is likely enough any more.
        const float wanted = 0.3f;
        int ends = slots;
        std::vector<float> alive(static_cast<size_t>(lines), 1.0f);
        for (int slot = 0; slot < slots && ends == slots; slot++) {
            bool likely = false;
            for (int line = 0; line < lines; line++) {
                alive[size_t(line)] *= expected_chances[size_t(line * slots + slot)];
                likely = likely || alive[size_t(line)] >= wanted;
            }
            if (!likely) ends = slot + 1;
        }
        const std::vector<float> enough(static_cast<size_t>(lines), wanted);
        tokens.assign(cells, -1);
        require(drafted(lines, slots, enough) == ends, "no slot beyond use");
        for (int line = 0; line < lines; line++)
            for (size_t at = size_t(line * slots); at < size_t(line * slots + ends); at++)
                require(tokens[at] == expected[at], "the same tokens up to there");
    }
    for (int line = 0; line < lines; line++)
        for (int slot = 0; slot < slots; slot++) {
            const size_t at = size_t(line * slots + slot);
            const int64_t before = slot ? expected[at - 1] : previous[size_t(line)];
            Draw draw = draws[size_t(line)];
            draw.position += slot;
            check_slot(one, base.data() + at * wide, beside.view(at, size_t(line)), before, expected[at], draw);
            const double chance = one.chance(hidden.data() + at * one.features(), before);
            require(std::fabs(chance - double(expected_chances[at])) < 1e-4, "its chance");
        }
}

// Numbers that are none lead somewhere in the vocabulary, never outside.
void broken(const Kernels* table) {
    const Head one = head();
    const size_t wide = size_t(one.width);
    std::vector<float> base(4 * wide, std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 2 * wide; i < base.size(); i++) base[i] = luck() % 3 ? kInf : base[i];
    std::vector<int64_t> previous(2, 0), tokens(4, -1);
    const std::vector<float> hidden(4 * one.features(), 1.0f), least(2, 0.0f);
    std::vector<float> chances(4);
    const std::vector<float> strange(8, std::numeric_limits<float>::quiet_NaN());
    const std::vector<int64_t> other(4, 0);
    for (const float temperature : {0.0f, 0.7f, 1e30f, 1e-30f}) {
        const std::vector<Draw> draws(2, {temperature, luck(), 3});
        Markov(one.first, one.second, one.width, one.ids, one.confidence, table, 3)
            .best(base.data(), hidden.data(), {strange.data(), other.data(), 2}, 2, 2, previous.data(), draws.data(), least.data(),
                  tokens.data(), chances.data());
        for (int64_t token : tokens) {
            bool there = false;
            for (int i = 0; i < one.width; i++) there = there || one.target(i) == token;
            require(there, "a token of the draft vocabulary, whatever the logits are");
        }
    }
}

void malformed(const Kernels* table) {
    const auto small = matrix(16, 32, 1.0f), large = matrix(40, 32, 1.0f), deep = matrix(40, 64, 1.0f);
    const std::vector<int64_t> none;
    const auto made = [&](const std::shared_ptr<Matrix>& first, const std::shared_ptr<Matrix>& second, int width,
                          const std::vector<int64_t>& ids) {
        return [=] { Markov(first, second, width, ids, {{1.0f}, {}, 0.0f, 1e-5f}, table, 1); };
    };
    const Confidence other{{1.0f}, {1.0f, 2.0f}, 0.0f, 1e-5f};
    refused([=] { Markov(small, small, 16, none, other, table, 1); }, "a confidence of another rank");
    refused([=] { Markov(small, small, 16, none, Confidence(), table, 1); }, "no confidence");
    made(large, small, 16, none)();
    made(small, large, 3, {15, 0, 15})();
    refused(made(nullptr, small, 16, none), "no first matrix");
    refused(made(small, nullptr, 16, none), "no second matrix");
    refused(made(small, deep, 16, none), "other ranks");
    refused(made(small, small, 0, none), "no tokens");
    refused(made(small, small, -8, none), "less than none");
    refused(made(large, small, 17, none), "more tokens than the second matrix has rows");
    refused(made(small, large, 40, none), "more tokens than the first matrix has rows");
    refused(made(small, large, 3, {1, 2}), "too few ids");
    refused(made(small, large, 3, {1, 2, 3, 4}), "too many ids");
    refused(made(small, large, 3, {1, 2, 16}), "an id beyond the first matrix");
    refused(made(small, large, 3, {1, -1, 2}), "an id below 0");
    refused(made(small, large, 3, {1, int64_t(1) << 40, 2}), "an id that would overflow");
    for (int rank : {0, -32, 1, 31, 33, 48}) refused([=] { Matrix(Format::kI8, 16, rank); }, "a rank that is no whole blocks");
}

}  // namespace

void fuzz_markov(const Kernels* table) {
    malformed(table);
    for (int round = 0; round < 16; round++) {
        compare(table);
        broken(table);
    }
}

}  // namespace paceline
