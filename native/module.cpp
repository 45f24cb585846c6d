// The Python boundary: shapes, strides and dtypes are checked here, so that a mistake is an exception, never a crash.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>

#include "boundary.h"
#include "decoder.h"
#include "markov_module.h"
#include "sampler_module.h"
#include "suffix_module.h"
#include "workers_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

std::vector<float> copied(const Vector<float>& x, size_t size, const char* name) {
    if (x.shape(0) != size)
        throw std::invalid_argument(std::string(name) + " must have " + std::to_string(size) + " values, got " +
                                    std::to_string(x.shape(0)));
    return std::vector<float>(x.data(), x.data() + size);
}

std::shared_ptr<Matrix> checked(std::shared_ptr<Matrix> matrix, int rows, int cols, const char* name) {
    if (!matrix || matrix->view().rows != rows || matrix->view().cols != cols)
        throw std::invalid_argument(std::string(name) + " must be a matrix of " + std::to_string(rows) + " x " +
                                    std::to_string(cols));
    return matrix;
}

Format format_named(const std::string& name) {
    if (name == "q4") return Format::kQ4;
    if (name == "q8") return Format::kQ8;
    if (name == "i8") return Format::kI8;
    if (name == "q4k") return Format::kQ4K;
    if (name == "q8f") return Format::kQ8F;
    throw std::invalid_argument("unknown format " + name + ": use q4, q8, i8, q4k or q8f");
}

// What Python builds layer by layer and then runs.
class Model {
  public:
    Model(int hidden, int heads, int kv_heads, int head_dim, int intermediate, float eps, const std::string& cache,
          const std::string& kernels, int threads, const Rows<float>& cos, const Rows<float>& sin)
        : cache_(cache_named(cache)), kernels_(kernels_named(kernels)), threads_(threads) {
        shape_ = {hidden, heads, kv_heads, head_dim, intermediate, eps};
        if (hidden < 1 || heads < 1 || kv_heads < 1 || head_dim < 2 || intermediate < 1 || threads < 1)
            throw std::invalid_argument("every size must be at least 1");
        if (cos.shape(1) != size_t(head_dim / 2) || sin.shape(1) != cos.shape(1) || sin.shape(0) != cos.shape(0))
            throw std::invalid_argument("cos and sin must be [positions, head_dim / 2]");
        cos_.assign(cos.data(), cos.data() + cos.size());
        sin_.assign(sin.data(), sin.data() + sin.size());
    }

    void add_layer(const Vector<float>& input_norm, const Vector<float>& post_norm, std::shared_ptr<Matrix> qkv,
                   std::shared_ptr<Matrix> out, std::shared_ptr<Matrix> gate_up, std::shared_ptr<Matrix> down,
                   int cache_group, const Vector<float>& qkv_bias, const Vector<float>& q_norm,
                   const Vector<float>& k_norm) {
        if (decoder_) throw std::invalid_argument("layers come before the cache is bound");
        const int d = shape_.head_dim, width = shape_.heads * d, wide = width + 2 * shape_.kv_heads * d;
        Layer layer;
        layer.input_norm = copied(input_norm, size_t(shape_.hidden), "input_norm");
        layer.post_norm = copied(post_norm, size_t(shape_.hidden), "post_norm");
        layer.qkv = checked(std::move(qkv), wide, shape_.hidden, "qkv");
        layer.out = checked(std::move(out), shape_.hidden, width, "out");
        layer.gate_up = checked(std::move(gate_up), 2 * shape_.intermediate, shape_.hidden, "gate_up");
        layer.down = checked(std::move(down), shape_.hidden, shape_.intermediate, "down");
        if (qkv_bias.size()) layer.qkv_bias = copied(qkv_bias, size_t(wide), "qkv_bias");
        if (q_norm.size()) layer.q_norm = copied(q_norm, size_t(d), "q_norm");
        if (k_norm.size()) layer.k_norm = copied(k_norm, size_t(d), "k_norm");
        if (cache_group < 0) throw std::invalid_argument("cache_group must not be negative");
        layer.cache_group = cache_group;
        groups_ = std::max(groups_, cache_group + 1);
        layers_.push_back(std::move(layer));
    }

    // The cache's tensors, one pair a layer, and for int8 their scales; they must outlive this object.
    void bind_cache(nb::list keys, nb::list values, nb::list key_scales, nb::list value_scales) {
        if (nb::len(keys) != layers_.size() && !decoder_) throw std::invalid_argument("one pair of caches a layer");
        if (!decoder_) decoder_ = std::make_unique<Decoder>(shape_, std::move(layers_), cos_, sin_, cache_, kernels_, threads_);
        auto& layers = decoder_->layers();
        if (nb::len(keys) != layers.size() || nb::len(values) != layers.size())
            throw std::invalid_argument("one pair of caches a layer");
        const size_t scales = cache_ == Cache::kI8 ? layers.size() : 0;
        if (nb::len(key_scales) != scales || nb::len(value_scales) != scales)
            throw std::invalid_argument("one pair of scales a layer for int8 caches, none for others");
        bound_ = false;
        slots_.assign(size_t(groups_), std::numeric_limits<int64_t>::max());
        for (size_t l = 0; l < layers.size(); l++) {
            const int group = layers[l].cache_group;
            layers[l].cache = {plane(keys[l], group), plane(values[l], group),
                               scales ? scale_plane(key_scales[l], group) : nullptr,
                               scales ? scale_plane(value_scales[l], group) : nullptr};
        }
        bound_ = true;
    }

    void run(MutableRows<float> hidden, const Vector<int64_t>& positions, const Vector<int64_t>& offsets,
             const Vector<int64_t>& starts, nb::object parents, int block_size, nb::list tables, nb::list slots,
             nb::list windows, int first, int last, bool mutual, nb::list taps, nb::list tapped) {
        if (!bound_) throw std::invalid_argument("bind the cache before running");
        Vector<int64_t> tree;
        StepView step = checked_step(positions, offsets, starts, parents, tree, block_size);
        if (hidden.shape(0) != size_t(step.rows) || hidden.shape(1) != size_t(shape_.hidden))
            throw std::invalid_argument("hidden must be [rows, hidden]");
        if (first < 0 || last < first || last > int(decoder_->layers().size())) throw std::invalid_argument("no such layers");
        for (int r = 0; r < step.rows; r++)
            if (step.positions[r] >= decoder_->max_positions())
                throw std::invalid_argument("a row lies beyond the model's positions");
        if (nb::len(tables) != size_t(groups_) || nb::len(slots) != size_t(groups_) || nb::len(windows) != size_t(groups_))
            throw std::invalid_argument("one table, slot list and window a cache group");
        std::vector<Rows<int64_t>> held_tables;
        std::vector<Vector<int64_t>> held_slots;
        for (int c = 0; c < groups_; c++) {
            held_tables.push_back(nb::cast<Rows<int64_t>>(tables[size_t(c)], false));
            held_slots.push_back(nb::cast<Vector<int64_t>>(slots[size_t(c)], false));
            add_tables(step, held_tables.back(), held_slots.back(), nb::cast<int>(windows[size_t(c)]), slots_[size_t(c)]);
        }
        if (mutual && step.parents != nullptr) throw std::invalid_argument("rows of trees cannot all see each other");
        step.mutual = mutual;
        if (nb::len(taps) != nb::len(tapped)) throw std::invalid_argument("one array a tap");
        std::vector<MutableRows<float>> held_taps;
        std::vector<Tap> copies;
        for (size_t t = 0; t < nb::len(taps); t++) {
            const int layer = nb::cast<int>(taps[t]);
            held_taps.push_back(nb::cast<MutableRows<float>>(tapped[t], false));
            if (layer < first || layer > last) throw std::invalid_argument("a tap lies outside the layers that run");
            if (held_taps.back().shape(0) != hidden.shape(0) || held_taps.back().shape(1) != hidden.shape(1))
                throw std::invalid_argument("what is tapped must be [rows, hidden]");
            copies.push_back({layer, held_taps.back().data()});
        }
        nb::gil_scoped_release free;
        decoder_->run(step, first, last, hidden.data(), copies);
    }

    void keep(std::shared_ptr<Matrix> mix, std::shared_ptr<Matrix> matrix, const Vector<float>& norm, nb::list taps,
              const Vector<int64_t>& positions, const Vector<int64_t>& slots) {
        if (!bound_) throw std::invalid_argument("bind the cache before running");
        const size_t wide = decoder_->layers().size() * 2 * size_t(shape_.kv_heads) * size_t(shape_.head_dim);
        checked(mix, shape_.hidden, int(nb::len(taps)) * shape_.hidden, "what mixes the taps");
        if (!matrix || matrix->view().cols != shape_.hidden || size_t(matrix->view().rows) < wide)
            throw std::invalid_argument("the matrix must hold the rows of keys and values of every layer");
        if (norm.shape(0) != size_t(shape_.hidden)) throw std::invalid_argument("norm must be as wide as the model");
        const size_t rows = positions.shape(0);
        if (slots.shape(0) != rows) throw std::invalid_argument("one position and one slot a row");
        std::vector<Rows<float>> held;
        std::vector<const float*> streams;
        for (size_t t = 0; t < nb::len(taps); t++) {
            held.push_back(nb::cast<Rows<float>>(taps[t], false));
            if (held.back().shape(0) != rows || held.back().shape(1) != size_t(shape_.hidden))
                throw std::invalid_argument("what is tapped must be [rows, hidden]");
            streams.push_back(held.back().data());
        }
        const int64_t limit = *std::min_element(slots_.begin(), slots_.end());
        for (size_t r = 0; r < rows; r++) {
            if (positions(r) < 0 || positions(r) >= decoder_->max_positions())
                throw std::invalid_argument("a row lies beyond the model's positions");
            if (slots(r) < 0 || slots(r) >= limit) throw std::invalid_argument("a slot lies outside the cache");
        }
        nb::gil_scoped_release free;
        decoder_->keep(*mix, *matrix, norm.data(), streams, int(rows), positions.data(), slots.data());
    }

    void head(std::shared_ptr<Matrix> matrix, const Vector<float>& norm, const Rows<float>& hidden,
              MutableRows<float> out) {
        if (!bound_) throw std::invalid_argument("bind the cache before running");
        if (!matrix || matrix->view().cols != shape_.hidden) throw std::invalid_argument("the head must have hidden columns");
        if (norm.shape(0) != size_t(shape_.hidden) || hidden.shape(1) != size_t(shape_.hidden))
            throw std::invalid_argument("norm and hidden must be as wide as the model");
        if (out.shape(0) != hidden.shape(0) || out.shape(1) != size_t(matrix->view().rows))
            throw std::invalid_argument("out must be [rows, rows of the head]");
        nb::gil_scoped_release free;
        decoder_->head(*matrix, norm.data(), hidden.data(), int(hidden.shape(0)), out.data(), int64_t(out.shape(1)));
    }

    std::string kernels() const { return kernels_->name; }
    int threads() const { return threads_; }

  private:
    void* plane(nb::handle tensor, int group) {
        auto x = nb::cast<Plane>(tensor, false);
        check_plane(x, cache_, shape_.kv_heads, shape_.head_dim);
        count_slots(group, x.shape(0));
        return x.data();
    }

    float* scale_plane(nb::handle tensor, int group) {
        auto x = nb::cast<nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(tensor, false);
        if (x.shape(1) != size_t(shape_.kv_heads))
            throw std::invalid_argument("scales of a cache must be [slots, kv_heads]");
        count_slots(group, x.shape(0));
        return x.data();
    }

    // A group's rows may use the slots that all its layers' planes have.
    void count_slots(int group, size_t count) {
        int64_t& slots = slots_[size_t(group)];
        slots = std::min<int64_t>(slots, int64_t(count));
    }

    Shape shape_;
    Cache cache_;
    const Kernels* kernels_;
    int threads_;
    int groups_ = 1;
    bool bound_ = false;
    std::vector<float> cos_, sin_;
    std::vector<Layer> layers_;
    std::vector<int64_t> slots_;
    std::unique_ptr<Decoder> decoder_;
};

// [blocks, kBlock, kBlock], or nothing.
using Passing = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

const float* checked_passing(const Matrix& matrix, const std::optional<Passing>& passing) {
    if (!passing) return nullptr;
    if (matrix.view().format != Format::kI8 && matrix.view().format != Format::kQ8)
        throw std::invalid_argument("only matrices of the forms i8 and q8 pass errors on");
    if (passing->shape(0) != size_t(matrix.view().blocks()) || passing->shape(1) != size_t(kBlock) || passing->shape(2) != size_t(kBlock))
        throw std::invalid_argument("passing must be [blocks, 32, 32]");
    return passing->data();
}

void take_blocks(Matrix& matrix, const Rows<uint8_t>& source, const std::string& type, int first, std::optional<Passing> passing) {
    const float* shares = checked_passing(matrix, passing);
    nb::gil_scoped_release free;
    matrix.take_blocks(source.data(), source.shape(1), type.c_str(), first, int(source.shape(0)), shares);
}

void take_floats(Matrix& matrix, const Rows<float>& source, int first, std::optional<Passing> passing) {
    const float* shares = checked_passing(matrix, passing);
    if (source.shape(1) != size_t(matrix.view().cols)) throw std::invalid_argument("source rows have another width");
    nb::gil_scoped_release free;
    matrix.take_floats(source.data(), first, int(source.shape(0)), shares);
}

void embed(const Matrix& matrix, const Vector<int64_t>& ids, MutableRows<float> out) {
    if (out.shape(0) != ids.shape(0) || out.shape(1) != size_t(matrix.view().cols))
        throw std::invalid_argument("out must be [ids, columns]");
    for (size_t i = 0; i < ids.shape(0); i++)
        if (ids(i) < 0 || ids(i) >= matrix.view().rows) throw std::invalid_argument("an id has no row");
    for (size_t i = 0; i < ids.shape(0); i++) matrix.row(int(ids(i)), out.data() + i * out.shape(1));
}

// x [rows, cols] in int8 with scales and sums per block, then times the matrix: the linear layer by itself.
void linear(const Matrix& matrix, const Rows<float>& x, MutableRows<float> out, const std::string& kernels) {
    const Kernels* table = kernels_named(kernels);
    const int rows = int(x.shape(0)), cols = matrix.view().cols;
    if (x.shape(1) != size_t(cols)) throw std::invalid_argument("x must be as wide as the matrix");
    if (out.shape(0) != x.shape(0) || out.shape(1) != size_t(matrix.view().rows))
        throw std::invalid_argument("out must be [rows of x, rows of the matrix]");
    const int blocks = cols / kBlock;
    std::vector<uint8_t> tiles(Quantised::bytes(rows, blocks));
    const Quantised quantised{tiles.data(), blocks};
    for (int r = 0; r < rows; r++)
        table->quantise(x.data() + size_t(r) * size_t(cols), blocks, quantised, r, 0, matrix.view().spread);
    table->gemm(matrix.view(), quantised, rows, 0, matrix.view().groups(), out.data(), matrix.view().rows, false);
}

}  // namespace
}  // namespace paceline

NB_MODULE(_native, m) {
    using namespace paceline;
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__", [](Matrix* self, const std::string& format, int rows, int cols, bool spread) {
            new (self) Matrix(format_named(format), rows, cols, spread);
        }, "format"_a, "rows"_a, "cols"_a, "spread"_a = false)
        .def("take_blocks", &take_blocks, "source"_a.noconvert(), "type"_a, "first"_a, "passing"_a.noconvert().none() = nb::none())
        .def("take_floats", &take_floats, "source"_a.noconvert(), "first"_a, "passing"_a.noconvert().none() = nb::none())
        .def("embed", &embed, "ids"_a.noconvert(), "out"_a.noconvert())
        .def("linear", &linear, "x"_a.noconvert(), "out"_a.noconvert(), "kernels"_a = "")
        .def_prop_ro("rows", [](const Matrix& x) { return x.view().rows; })
        .def_prop_ro("cols", [](const Matrix& x) { return x.view().cols; })
        .def_prop_ro("nbytes", &Matrix::bytes);
    nb::class_<Model>(m, "Model")
        .def(nb::init<int, int, int, int, int, float, const std::string&, const std::string&, int, const Rows<float>&,
                      const Rows<float>&>(),
             "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "intermediate"_a, "eps"_a, "cache"_a, "kernels"_a,
             "threads"_a, "cos"_a.noconvert(), "sin"_a.noconvert())
        .def("add_layer", &Model::add_layer, "input_norm"_a.noconvert(), "post_norm"_a.noconvert(), "qkv"_a, "out"_a, "gate_up"_a, "down"_a,
             "cache_group"_a, "qkv_bias"_a.noconvert(), "q_norm"_a.noconvert(), "k_norm"_a.noconvert())
        .def("bind_cache", &Model::bind_cache, "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a)
        .def("run", &Model::run, "hidden"_a.noconvert(), "positions"_a.noconvert(), "offsets"_a.noconvert(), "starts"_a.noconvert(), "parents"_a.none(), "block_size"_a,
             "tables"_a, "slots"_a, "windows"_a, "first"_a, "last"_a, "mutual"_a = false, "taps"_a = nb::list(),
             "tapped"_a = nb::list())
        .def("keep", &Model::keep, "mix"_a, "matrix"_a, "norm"_a.noconvert(), "taps"_a, "positions"_a.noconvert(),
             "slots"_a.noconvert())
        .def("head", &Model::head, "matrix"_a, "norm"_a.noconvert(), "hidden"_a.noconvert(), "out"_a.noconvert())
        .def_prop_ro("kernels", &Model::kernels)
        .def_prop_ro("threads", &Model::threads);
    bind_workers(m);
    bind_markov(m);
    bind_sampler(m);
    bind_suffix(m);
    m.def("available_kernels", [] {
        nb::list names;
        for (const char* name : {"neon", "avx2", "portable"})
            if (kernels_by_name(name) != nullptr) names.append(name);
        return names;
    });
}
