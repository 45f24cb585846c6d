// Where the states of a suffix tree lead beyond their first successor: a hash table, with each state's edges in the order
// in which they came.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline {

struct SuffixEdge {
    int32_t state, token, child;
    int32_t next;       // of the same state; -1: the last one
    int32_t next_here;  // in the same slot of the table; -1: the last one
};

class SuffixEdges {
  public:
    // `key` makes the slots unforeseeable: whatever tokens somebody sends, few of their edges share one (multiply-shift
    // hashing by a random odd number is universal).
    explicit SuffixEdges(uint64_t key) : key_(key | 1), slots_(16, -1) {}

    // Its index; -1: there is none.
    int32_t find(int32_t state, int32_t token) const {
        int32_t e = slots_[slot(state, token)];
        while (e >= 0 && (edges_[size_t(e)].state != state || edges_[size_t(e)].token != token)) e = edges_[size_t(e)].next_here;
        return e;
    }

    // One that is not there yet. `previous`: the state's last one so far, or -1.
    int32_t add(int32_t state, int32_t token, int32_t child, int32_t previous) {
        if (edges_.size() == slots_.size()) grow();
        int32_t& here = slots_[slot(state, token)];
        const auto e = int32_t(edges_.size());
        edges_.push_back({state, token, child, -1, here});
        here = e;
        if (previous >= 0) edges_[size_t(previous)].next = e;
        return e;
    }

    SuffixEdge& operator[](int32_t e) { return edges_[size_t(e)]; }
    const SuffixEdge& operator[](int32_t e) const { return edges_[size_t(e)]; }

  private:
    size_t slot(int32_t state, int32_t token) const {
        return size_t((uint64_t(uint32_t(state)) << 32 | uint32_t(token)) * key_ >> shift_);
    }

    void grow() {
        edges_.reserve(2 * edges_.size());
        slots_.assign(2 * slots_.size(), -1);
        shift_--;
        for (size_t e = 0; e < edges_.size(); e++) {
            int32_t& here = slots_[slot(edges_[e].state, edges_[e].token)];
            edges_[e].next_here = here;
            here = int32_t(e);
        }
    }

    uint64_t key_;
    int shift_ = 60;  // 64 less the bits of a slot
    std::vector<int32_t> slots_;
    std::vector<SuffixEdge> edges_;
};

}  // namespace paceline
