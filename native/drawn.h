// Tokens of a draft vocabulary that are drawn as the target will draw: the best of logit / temperature and its own noise.
#pragma once

#include <cstdint>
#include <vector>

#include "noise.h"

namespace paceline {

// How the tokens of a line are drawn. At temperature 0 they are its likeliest ones, and there is no noise.
struct Draw {
    float temperature = 0.0f;
    uint64_t seed = 0;
    int64_t position = 0;  // of the first one, in the text
};

// A token, by its place in the draft vocabulary, and what it is chosen by.
struct Leader {
    float score;
    int token;
};

// Noise belongs to the target's ids, of which four share an evaluation of the generator.
class Drawn {
  public:
    // The target's id of each token of the draft vocabulary; empty where they are the same.
    Drawn(int width, const std::vector<int64_t>& ids);

    // Of tokens [begin, end) the one with the best score, of ties the first; `likeliest`: the one among them with the
    // largest logit, of ties the first. No better one is missed, however lucky it has to be.
    Leader best(const float* logits, int begin, int end, Leader likeliest, float temperature, const Noise& noise) const;

    // The score of a token by its id. Where it cannot be better than `least` it may be too high, but not above that.
    float score(float logit, uint32_t id, float least, float temperature, const Noise& noise) const;

  private:
    struct Search;
    bool try_near(Search& now, float low) const;
    void try_lucky(Search& now, double cap) const;
    void offer(Search& now, int token, uint32_t bits) const;

    GumbelBound bound_;
    std::vector<uint32_t> quads_;  // of each run of tokens whose ids share one, and a few more
    std::vector<int> starts_;      // of each run, and the width
    std::vector<uint32_t> run_of_;
    std::vector<uint32_t> ids_;
};

}  // namespace paceline
