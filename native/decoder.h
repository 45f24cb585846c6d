// A Llama-like decoder over paged keys and values: the whole forward of a step in one parallel region.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
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
    Planes cache;
};

// Where the residual stream that enters a layer is copied to, [rows, hidden]; the number of layers: what leaves the last.
struct Tap {
    int layer = 0;
    float* out = nullptr;
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

    // Layers [first, last) on the residual stream [rows, hidden], in place; stores keys and values. Taps lie in
    // [first, last].
    void run(const StepView& step, int first, int last, float* hidden, const std::vector<Tap>& taps = {});

    // Only store: keys and values of every layer, made of norm(mix . (taps[0][r], taps[1][r], ...)) by one matrix that
    // holds the rows of keys and values of layer after layer. taps: [rows, hidden] each. slots: of the rows.
    void keep(const Matrix& mix, const Matrix& matrix, const float* norm, const std::vector<const float*>& taps, int rows,
              const int64_t* positions, const int64_t* slots);

    // out[r] = matrix . norm(hidden[r]) for `rows` rows.
    void head(const Matrix& matrix, const float* norm, const float* hidden, int rows, float* out, int64_t ldout);

  private:
    void tap(int id, int layer, int rows, const float* hidden, const std::vector<Tap>& taps) const;
    void split_heads(int id, const StepView& step, const Layer& layer);
    // One head's key or value, biased, normed and rotated, into the cache.
    void store_head(const Layer& layer, float* x, bool key, int head, int64_t position, int64_t slot);
    // Floats from row to row; an odd number of lines, so that rows do not fight for the same lines of the cache.
    int gate_up_stride() const { return 2 * shape_.intermediate + 16; }
    Quantised gated() { return {gated_int8_.data(), shape_.intermediate / kBlock}; }
    Quantised rounded(int id, const float* x, const float* weight, const Matrix& matrix, int rows);
    void gate_and_up(int id, const Layer& layer, const Quantised& x, int rows);
    void gemm(int id, const Matrix& matrix, const Quantised& x, int rows, float* y, int64_t ldy, bool add);
    void reserve(int rows);

    Shape shape_;
    std::vector<Layer> layers_;
    std::vector<float> cos_, sin_;                 // [positions, head_dim / 2]
    int64_t positions_;
    Cache cache_;
    const Kernels* kernels_;
    std::shared_ptr<Pool> shared_;
    Pool& pool_ = *shared_;
    PagedAttention attention_;

    // Scratch, grown as needed.
    std::vector<float> normed_, qkv_, attended_, gate_up_, kept_, mixed_;
    std::vector<uint8_t> int8_, gated_int8_, taps_int8_;
    std::vector<std::vector<uint8_t>> own_int8_;   // a thread's own, for few rows
};

}  // namespace paceline
