// A Llama-like decoder over paged keys and values: the whole forward of a step in one parallel region.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "packing.h"
#include "pool.h"

namespace paceline {

struct Shape {
    int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0;
    float eps = 1e-5f;
};

struct Layer {
    std::vector<float> input_norm, post_norm;
    std::vector<float> qkv_bias;           // empty: none
    std::vector<float> q_norm, k_norm;     // empty: none
    std::shared_ptr<Matrix> qkv, out, gate_up, down;
    int cache_group = 0;
    void* keys = nullptr;                  // [slots, kv_heads, head_dim]
    void* values = nullptr;
    float* key_scales = nullptr;           // [slots, kv_heads], int8 caches only
    float* value_scales = nullptr;
};

// One cache group's view of a step.
struct GroupTables {
    const int64_t* tables = nullptr;       // [groups, width] block ids
    int64_t width = 0;
    const int64_t* slots = nullptr;        // [rows]
    int window = 0;                        // 0: none
};

struct StepView {
    int rows = 0, groups = 0, block_size = 0;
    const int64_t* positions = nullptr;    // [rows]
    const int64_t* offsets = nullptr;      // [groups + 1]
    const int64_t* starts = nullptr;       // [groups]
    const int64_t* parents = nullptr;      // [rows] row in its group, -1 for the first; nullptr: all chains
    std::vector<GroupTables> caches;
};

class Decoder {
  public:
    Decoder(const Shape& shape, std::vector<Layer> layers, std::vector<float> cos, std::vector<float> sin,
            Cache cache, const Kernels* kernels, int threads);

    const Shape& shape() const { return shape_; }
    const Kernels& kernels() const { return *kernels_; }
    int threads() const { return pool_.size(); }
    std::vector<Layer>& layers() { return layers_; }
    int64_t max_positions() const { return positions_; }

    // Layers [first, last) on the residual stream [rows, hidden], in place; stores keys and values.
    void run(const StepView& step, int first, int last, float* hidden);

    // out[r] = matrix . norm(hidden[r]) for `rows` rows.
    void head(const Matrix& matrix, const float* norm, const float* hidden, int rows, float* out, int64_t ldout);

  private:
    struct Tile { int group, row, rows; };  // consecutive rows of a group that see the same keys

    // Where the rows of a step find their keys, in logical order, in one cache group.
    struct Plan {
        int window = 0;
        const int64_t* slots = nullptr;       // [rows] where each row's own key goes
        std::vector<int64_t> keys;            // all groups' key slots, group after group
        std::vector<int64_t> first;           // [groups] where a group's list begins
        std::vector<std::vector<int64_t>> own;  // [rows] of trees: slots from the group's start on; chains: empty
    };

    void plan(const StepView& step);
    void split_heads(int id, const StepView& step, const Layer& layer, const Plan& plan);
    void attention(int id, const Layer& layer, const Plan& plan, std::atomic<int>* tasks, std::atomic<int>* merges);
    void attend_tile(const Layer& layer, const Plan& plan, const Tile& tile, int head, int64_t key_tile,
                     float* out, float* peak, float* mass) const;
    void finish(const Tile& tile, int head, const float* out, const float* mass);
    int64_t first_key_tile(const Plan& plan, const Tile& tile) const;
    int64_t last_key_tile(const Tile& tile) const;
    Quantised quantised(int cols) { return {tiles_of_int8_.data(), cols / kBlock}; }
    void norm_and_quantise(int id, const float* x, const float* weight, int rows);
    void gemm(int id, const Matrix& matrix, int rows, float* y, int64_t ldy, bool add);
    void reserve(int rows);

    Shape shape_;
    std::vector<Layer> layers_;
    std::vector<float> cos_, sin_;                 // [positions, head_dim / 2]
    int64_t positions_;
    Cache cache_;
    const Kernels* kernels_;
    Pool pool_;

    // Of the step that is running:
    std::vector<Plan> plans_;
    std::vector<Tile> tiles_;
    std::vector<int64_t> starts_;                  // [groups]
    std::vector<int64_t> seen_;                    // [rows] position of the row: it sees keys 0 .. seen
    std::vector<int64_t> group_row_;               // [groups] first row
    int64_t most_key_tiles_ = 0;
    bool split_keys_ = false;                      // few rows: the keys of one row are shared out as well

    // Scratch, grown as needed.
    std::vector<float> normed_, qkv_, attended_, gate_up_, partial_, peaks_, masses_;
    std::vector<uint8_t> tiles_of_int8_;
};

}  // namespace paceline
