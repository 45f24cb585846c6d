// The Markov head of a block drafter: which tokens follow each other in a block, slot after slot.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "drawn.h"
#include "kernels.h"
#include "packing.h"
#include "pool.h"

namespace paceline {

// How likely a slot's token is to be accepted: sigmoid(hidden . x / rms(x) + token . W1[token before it] + bias), x being
// what the layers left of the slot.
struct Confidence {
    std::vector<float> hidden, token;  // token empty: that does not matter
    float bias = 0.0f, eps = 0.0f;
};

// Tokens beside the draft vocabulary, other ones in every line, of which W2 knows nothing: what a slot's logits are without
// it. Where a line has fewer than `width`, -inf.
struct Further {
    const float* logits = nullptr;  // [lines, slots, width]
    const int64_t* ids = nullptr;   // [lines, width], the target's
    int width = 0;
};

// Slot j of a block has logits base[j] + W2 W1[token before it]. Only this is sequential, and little of it: the whole
// block is one parallel region, in which each thread looks at the same tokens of every slot.
class Markov {
  public:
    // first [tokens of the target, rank], second [at least `width`, rank]; ids [width]: the target's ids of the tokens of
    // the draft vocabulary, empty where they are the same.
    Markov(std::shared_ptr<Matrix> first, std::shared_ptr<Matrix> second, int width, std::vector<int64_t> ids,
           Confidence confidence, const Kernels* kernels, int threads);

    int width() const { return width_; }
    int hidden() const { return int(confidence_.hidden.size()); }
    int64_t target_tokens() const { return first_->view().rows; }

    // The likeliest token of each slot after the one before it, of ties the first, or the one that is drawn there as
    // draws [lines] say: tokens [lines, slots], as the target knows them, and their chances [lines, slots]. base [lines,
    // slots, width], hidden [lines, slots, hidden]; previous [lines]: before the first slot. A further token has to be
    // better than all of the draft vocabulary. Ends behind the slot with which no line is as likely to be accepted so far
    // as its `least` [lines] any more; returns how many slots there are then.
    int best(const float* base, const float* hidden, const Further& further, int lines, int slots, const int64_t* previous,
             const Draw* draws, const float* least, int64_t* tokens, float* chances);

  private:
    Leader leader(const float* base, float* scores, int begin, int end) const;
    float chance(const float* hidden, const float* before) const;

    std::shared_ptr<Matrix> first_, second_;
    int width_;
    std::vector<int64_t> ids_;
    Drawn drawn_{0, {}};
    Confidence confidence_;
    const Kernels* kernels_;
    std::shared_ptr<Pool> shared_;
    Pool& pool_ = *shared_;
    std::mutex mutex_;  // one call at a time: the others wait

    // Scratch, grown as needed.
    std::vector<float> before_, bias_, alive_;
    std::vector<uint8_t> rounded_;
    std::vector<Leader> leaders_;  // [threads, lines]
};

}  // namespace paceline
