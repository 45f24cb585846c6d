// The Markov head of a block drafter: which tokens follow each other in a block, slot after slot.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "packing.h"
#include "pool.h"

namespace paceline {

// Slot j of a block has logits base[j] + W2 W1[token before it]. Only this is sequential, and little of it: the whole
// block is one parallel region, in which each thread looks at the same tokens of every slot.
class Markov {
  public:
    // first [tokens of the target, rank], second [at least `width`, rank]; ids [width]: the target's ids of the tokens of
    // the draft vocabulary, empty where they are the same.
    Markov(std::shared_ptr<Matrix> first, std::shared_ptr<Matrix> second, int width, std::vector<int64_t> ids,
           const Kernels* kernels, int threads);

    int width() const { return width_; }
    int64_t target_tokens() const { return first_->view().rows; }

    // The likeliest token of each slot after the one before it, of ties the first: tokens [lines, slots], as the target
    // knows them. base [lines, slots, width]; previous [lines]: before the first slot.
    void best(const float* base, int lines, int slots, const int64_t* previous, int64_t* tokens);

  private:
    struct Leader {
        float score;
        int token;
    };
    Leader leader(const float* base, const float* bias, int begin, int end) const;

    std::shared_ptr<Matrix> first_, second_;
    int width_;
    std::vector<int64_t> ids_;
    const Kernels* kernels_;
    std::shared_ptr<Pool> shared_;
    Pool& pool_ = *shared_;
    std::mutex mutex_;  // one call at a time: the others wait

    // Scratch, grown as needed.
    std::vector<float> before_, bias_;
    std::vector<uint8_t> rounded_;
    std::vector<Leader> leaders_;  // [threads, lines]
};

}  // namespace paceline
