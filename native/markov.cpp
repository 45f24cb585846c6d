#include "markov.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace paceline {

Markov::Markov(std::shared_ptr<Matrix> first, std::shared_ptr<Matrix> second, int width, std::vector<int64_t> ids,
               Confidence confidence, const Kernels* kernels, int threads)
    : first_(std::move(first)), second_(std::move(second)), width_(width), ids_(std::move(ids)),
      confidence_(std::move(confidence)), kernels_(kernels), shared_(Pool::shared(threads)) {
    if (!first_ || !second_ || first_->view().cols != second_->view().cols)
        throw std::invalid_argument("both matrices must have as many columns");
    if (width_ < 1 || width_ > second_->view().rows) throw std::invalid_argument("the second matrix has too few rows");
    if (!ids_.empty() && ids_.size() != size_t(width_)) throw std::invalid_argument("one id a token of the draft vocabulary");
    if (ids_.empty() && width_ > first_->view().rows) throw std::invalid_argument("the first matrix has too few rows");
    if (confidence_.hidden.empty()) throw std::invalid_argument("confidence needs a weight for each hidden value");
    if (!confidence_.token.empty() && confidence_.token.size() != size_t(first_->view().cols))
        throw std::invalid_argument("confidence must have as many weights of a token as the matrices have columns");
    for (const int64_t id : ids_)
        if (id < 0 || id >= first_->view().rows) throw std::invalid_argument("an id has no row in the first matrix");
    drawn_ = Drawn(width_, ids_);
}

// Of tokens [begin, end), begin being a multiple of kLanes; `scores`, so far what the token before adds, become the logits.
Leader Markov::leader(const float* base, float* scores, int begin, int end) const {
    // Lane by lane, which compilers turn into a few vector instructions.
    float score[kLanes];
    int at[kLanes];
    std::fill(score, score + kLanes, -std::numeric_limits<float>::infinity());
    std::fill(at, at + kLanes, begin);
    int token = begin;
    for (; token + kLanes <= end; token += kLanes)
        for (int lane = 0; lane < kLanes; lane++) {
            const float sum = base[token + lane] + scores[token + lane];
            scores[token + lane] = sum;
            const bool better = sum > score[lane];
            score[lane] = better ? sum : score[lane];
            at[lane] = better ? token + lane : at[lane];
        }
    Leader found{score[0], at[0]};
    for (int lane = 1; lane < kLanes; lane++)
        if (score[lane] > found.score || (score[lane] == found.score && at[lane] < found.token)) found = {score[lane], at[lane]};
    for (; token < end; token++) {
        const float sum = base[token] + scores[token];
        scores[token] = sum;
        if (sum > found.score) found = {sum, token};
    }
    return found;
}

float Markov::chance(const float* hidden, const float* before) const {
    double sum = 0.0, squares = 0.0, sure = confidence_.bias;
    for (size_t i = 0; i < confidence_.hidden.size(); i++) {
        sum += double(hidden[i]) * double(confidence_.hidden[i]);
        squares += double(hidden[i]) * double(hidden[i]);
    }
    sure += sum / std::sqrt(squares / double(confidence_.hidden.size()) + double(confidence_.eps));
    for (size_t i = 0; i < confidence_.token.size(); i++) sure += double(before[i]) * double(confidence_.token[i]);
    return float(1.0 / (1.0 + std::exp(-sure)));
}

int Markov::best(const float* base, const float* hidden, const Further& further, int lines, int slots, const int64_t* previous,
                 const Draw* draws, const float* least, int64_t* tokens, float* chances) {
    if (lines == 0 || slots == 0) return 0;
    const std::lock_guard<std::mutex> turn(mutex_);
    const Packed& first = first_->view();
    const Packed& second = second_->view();
    const int blocks = first.cols / kBlock, threads = pool_.size();
    const size_t rank = size_t(first.cols), stride = size_t(second.rows), wide = size_t(width_);
    before_.resize(std::max(before_.size(), size_t(lines) * rank));
    bias_.resize(std::max(bias_.size(), size_t(lines) * stride));
    rounded_.resize(std::max(rounded_.size(), Quantised::bytes(lines, blocks)));
    leaders_.resize(size_t(threads) * size_t(lines));
    alive_.assign(size_t(lines), 1.0f);
    const Quantised rounded{rounded_.data(), blocks};
    const size_t features = confidence_.hidden.size();
    int count = slots;  // thread 0 says where it ends, between barriers
    pool_.run([&](int id) {
        int64_t begin, end;
        Team::share(second.groups(), id, threads, &begin, &end);
        const int from = std::min(int(begin) * kLanes, width_), to = std::min(int(end) * kLanes, width_);
        bool last = false;
        for (int slot = 0; !last; slot++) {
            // Rows are read and rounded in no time: one thread does it for all.
            if (id == 0) {
                bool likely = false;
                for (int line = 0; line < lines; line++) {
                    const size_t at = size_t(line) * size_t(slots) + size_t(slot);
                    const int64_t token = slot == 0 ? previous[line] : tokens[at - 1];
                    float* row = before_.data() + size_t(line) * rank;
                    first_->row(int(token), row);
                    kernels_->quantise(row, blocks, rounded, line, 0, second.spread);
                    chances[at] = chance(hidden + at * features, row);
                    alive_[size_t(line)] *= chances[at];
                    likely = likely || alive_[size_t(line)] >= least[line];
                }
                if (!likely) count = slot + 1;
            }
            pool_.team().barrier();
            last = slot + 1 == count;
            kernels_->gemm(second, rounded, lines, int(begin), int(end), bias_.data(), second.rows, false);
            for (int line = 0; line < lines; line++) {
                const float* own = base + (size_t(line) * size_t(slots) + size_t(slot)) * wide;
                float* scores = bias_.data() + size_t(line) * stride;
                Leader found = leader(own, scores, from, to);
                if (draws[line].temperature > 0.0f)
                    found = drawn_.best(scores, from, to, found, draws[line].temperature,
                                        Noise(draws[line].seed, draws[line].position + slot));
                leaders_[size_t(id) * size_t(lines) + size_t(line)] = found;
            }
            pool_.team().barrier();
            if (id != 0) continue;
            for (int line = 0; line < lines; line++) {
                Leader found = leaders_[size_t(line)];
                for (int other = 1; other < threads; other++) {
                    const Leader& more = leaders_[size_t(other) * size_t(lines) + size_t(line)];
                    if (more.score > found.score) found = more;
                }
                const size_t at = size_t(line) * size_t(slots) + size_t(slot), more = size_t(further.width);
                tokens[at] = ids_.empty() ? found.token : ids_[size_t(found.token)];
                const Draw& draw = draws[line];
                const Noise noise(draw.seed, draw.position + slot);
                for (size_t i = 0; i < more; i++) {
                    const int64_t token = further.ids[size_t(line) * more + i];
                    float score = further.logits[at * more + i];
                    if (draw.temperature > 0.0f) score = drawn_.score(score, uint32_t(token), found.score, draw.temperature, noise);
                    if (!(score > found.score)) continue;
                    found.score = score;
                    tokens[at] = token;
                }
            }
        }
    });
    return count;
}

}  // namespace paceline
