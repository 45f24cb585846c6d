// Every substring of some growing texts, how often it occurred and what followed it most often.
//
// speculation/suffix_automaton.py says how it works; this is the same in the same order, down to the numbers of states,
// ties and every bit of a score: what changes here changes there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "suffix_edges.h"

namespace paceline {

// One text of a tree: where its end stands.
struct SuffixText {
    int32_t last = 0;     // the state of the whole text
    int32_t deepest = 0;  // the state of its last `depth` tokens: from here on down the links, counts are kept
    int32_t length = 0;
};

// How far what was found is followed.
struct SuffixReach {
    int32_t longest = 1;  // tokens at the end of a text that are looked for
    double factor = 1.0;  // a match of m tokens is continued by at most factor * m + offset
    double offset = 0.0;
    double min_prob = 0.0;   // of the whole path, as counted
    bool branching = false;  // the most probable paths instead of a chain of the most frequent tokens
};

// What followed a string, as a tree: parents before children, -1 for what follows the string itself.
struct Continuation {
    struct Node {
        int32_t token, parent;
        int32_t count;      // how often it followed its parent's path
        int32_t continued;  // how often anything followed that path
        int32_t context;    // how many tokens that path has, the string before it included
        double score;       // count / continued, less what is in doubt where little was counted after a short path
        double path;        // the product of the scores on the way here
    };

    explicit Continuation(int32_t string) : matched(string) {}
    void add(int32_t token, int32_t parent, int32_t count, int32_t continued, int32_t context);

    int32_t matched;  // how many tokens the string has
    std::vector<Node> nodes;
    double expected = 0.0;  // the sum of all paths
};

// (state, length) of a string: of those that a state stands for, the one of that length.
struct SuffixMatch {
    int32_t state, length;
};

// Grows by extend() only; several texts may grow in turns. Tokens must not be negative, states must be of this tree, and
// there is room for kMostTokens.
class SuffixTree {
  public:
    static constexpr int64_t kMostTokens = int64_t(1) << 29;  // states, up to two a token, and edges, up to three

    // `key` is any random number (see SuffixEdges): it changes no answer.
    SuffixTree(int32_t depth, uint64_t key);

    void extend(SuffixText& text, const int32_t* tokens, size_t count);

    // Of the longest suffix of `tokens`, of at most `longest` of them, that occurs here and was continued.
    SuffixMatch match(const int32_t* tokens, size_t count, int32_t longest) const;
    // The same for the end of one of the texts. longest <= depth.
    SuffixMatch match_end(const SuffixText& text, int32_t longest) const;

    int32_t occurrences(const int32_t* string, size_t count) const;
    // Its most frequent continuation, while the probability of the whole path is at least `least`.
    Continuation chain(SuffixMatch from, int64_t size, double least) const;
    // Its `size` most probable continuations of up to `depth` tokens, the most probable first.
    Continuation branches(SuffixMatch from, int64_t size, int64_t depth, double least) const;
    // What a drafter follows a match by.
    Continuation follow(SuffixMatch from, const SuffixReach& reach, int64_t nodes, int64_t depth) const;

    int32_t depth() const { return depth_; }
    int32_t states() const { return int32_t(states_.size()); }
    int64_t tokens() const { return tokens_; }

  private:
    // Most states have one successor, kept inline; the further ones are edges.
    struct State {
        int32_t length;  // of the longest string
        int32_t link;    // the state of the next shorter suffixes, those that occur at more places
        int32_t count = 0;      // occurrences
        int32_t continued = 0;  // occurrences that something followed
        int32_t best = -1;      // the token that followed most often; among equals, most recently
        int32_t best_count = 0;
        int32_t token = -1, child = -1;
        int32_t first = -1, last = -1, more = 0;  // edges, and how many
    };

    State& at(int32_t state) { return states_[size_t(state)]; }
    const State& at(int32_t state) const { return states_[size_t(state)]; }
    int32_t next(int32_t state, int32_t token) const;
    void add_edge(int32_t state, int32_t token, int32_t child);
    int32_t add_state(const State& state);
    int32_t append(int32_t last, int32_t token);
    int32_t split(int32_t from, int32_t token, int32_t old);
    void count_from(SuffixText& text, int32_t token);
    int32_t shortened(int32_t state, int32_t size) const;
    SuffixMatch continuable(SuffixMatch found) const;
    SuffixMatch going_on(SuffixMatch path) const;
    template <class Take> void successors(int32_t state, const Take& take) const;

    int32_t depth_;
    int64_t tokens_ = 0;
    std::vector<State> states_;
    SuffixEdges edges_;
};

}  // namespace paceline
