// Attention over paged keys and values: which keys the rows of a step see, worked out once, then layer after layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace paceline {

// One cache group's view of a step.
struct GroupTables {
    const int64_t* tables = nullptr;       // [groups, width] block ids
    int64_t width = 0;
    const int64_t* slots = nullptr;        // [rows]
    int window = 0;                        // 0: none
    int64_t first = 0;                     // positions below it are seen by no row
};

struct StepView {
    int rows = 0, groups = 0, block_size = 0;
    const int64_t* positions = nullptr;    // [rows] start of the group + depth
    const int64_t* offsets = nullptr;      // [groups + 1]
    const int64_t* starts = nullptr;       // [groups]
    const int64_t* parents = nullptr;      // [rows] row in its group, -1 for the first; nullptr: all chains
    bool mutual = false;                   // rows of a group see each other whatever their order; all chains then
    std::vector<GroupTables> caches;
};

// One layer's cache.
struct Planes {
    void* keys = nullptr;                  // [slots, kv_heads, head_dim]
    void* values = nullptr;
    float* key_scales = nullptr;           // [slots, kv_heads], int8 caches only
    float* value_scales = nullptr;
};

class PagedAttention {
  public:
    // What the threads of one layer have taken on so far; a fresh one for every call of attend.
    struct Tasks { std::atomic<int> attended{0}, merged{0}; };

    PagedAttention(int heads, int kv_heads, int head_dim, Cache cache, const Kernels* kernels);

    // Work out who sees what, for a team of `threads`. What the step points at must stay as long as it is attended.
    void plan(const StepView& step, int threads);

    // One layer, by all threads of the team that was planned for; nobody may read `out` before the next barrier.
    // q: [rows, heads, head_dim], scaled (packed for int8 caches), `stride` floats from row to row. The rows' own keys
    // and values are stored. out: [rows, heads, head_dim]. cache_group: of the step's caches.
    void attend(Team& team, int id, const Planes& planes, int cache_group, const float* q, size_t stride, float* out,
                Tasks& tasks);

  private:
    struct Tile { int group, row, rows; };  // consecutive rows of a group that see the same keys

    // Where the rows of a step find their keys, in logical order, in one cache group.
    struct Plan {
        int window = 0;
        int64_t oldest = 0;                   // positions below it are seen by no row
        std::vector<int64_t> keys;            // all groups' key slots, group after group
        std::vector<int64_t> first;           // [groups] where a group's list begins
        std::vector<std::vector<int64_t>> own;  // [rows] of trees: slots from the group's start on; chains: empty
    };

    struct Layer {
        const Planes& planes;
        const Plan& plan;
        const float* q;
        size_t stride;
    };

    // What the queries of a tile have seen: weighted values, the largest score, the sum of the weights.
    struct Result { float *sum, *peak, *mass; };

    // before, behind: how many heads of this tile the same thread takes before and after this one.
    void attend_tile(const Layer& layer, const Tile& tile, int head, int before, int behind, int64_t key_tile, float* out,
                     float* peak, float* mass) const;
    // A span: kSpan key tiles, folded in order by themselves. Which keys a span holds depends on their positions alone.
    void attend_span(const Layer& layer, const Tile& tile, int head, int heads, int64_t span, const Result* results) const;
    void attend_spans(Team& team, int id, const Layer& layer, std::atomic<int>& next);
    void fold(const Result& more, int queries, const Result& into) const;
    Result partial(int64_t job, int64_t span);  // where a span's result is kept, of job = (tile, head)
    void finish(const Tile& tile, int head, const float* sum, const float* mass, float* out) const;
    int64_t oldest_key(const Plan& plan, int row) const;  // that a row sees
    int64_t first_key_tile(const Plan& plan, const Tile& tile) const;
    int64_t last_key_tile(const Tile& tile) const;

    const int heads_, kv_heads_, head_dim_;
    const Cache cache_;
    const Kernels* kernels_;

    // Of the step that is running:
    std::vector<Plan> plans_;
    std::vector<Tile> tiles_;
    std::vector<int64_t> starts_;                  // [groups]
    std::vector<int64_t> seen_;                    // [rows] the last key that a row sees: its own, or its group's last
    int64_t most_spans_ = 0;
    size_t most_queries_ = 0;                      // of a tile, all its rows and heads of a key head together
    int together_ = 1;                             // key heads that a thread takes of a tile
    bool split_keys_ = false;                      // few rows: the keys of one row are shared out as well
    std::vector<float> partial_, peaks_, masses_;  // then: the results of every span, grown as needed
};

}  // namespace paceline
