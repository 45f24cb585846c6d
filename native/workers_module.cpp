// Single operations for models that are written in Python: a team of threads, and what it can be asked to do.
#include "workers_module.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "boundary.h"
#include "packing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Heads = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using MutableHeads = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

int at_most_cores(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    const unsigned cores = std::thread::hardware_concurrency();  // 0: not known
    return cores == 0 ? threads : std::min(threads, int(cores));
}

class Workers {
  public:
    Workers(int threads, const std::string& kernels) : kernels_(kernels_named(kernels)), shared_(Pool::shared(at_most_cores(threads))) {}

    // out = x times the matrix, x rounded to int8 with a scale per block.
    void linear(const Matrix& matrix, const Rows<float>& x, MutableRows<float> out) {
        const int rows = int(x.shape(0)), cols = matrix.view().cols, blocks = cols / kBlock;
        if (x.shape(1) != size_t(cols)) throw std::invalid_argument("x must be as wide as the matrix");
        if (out.shape(0) != x.shape(0) || out.shape(1) != size_t(matrix.view().rows))
            throw std::invalid_argument("out must be [rows of x, rows of the matrix]");
        nb::gil_scoped_release free;
        std::lock_guard<std::mutex> lock(mutex_);
        rounded_.resize(std::max(rounded_.size(), Quantised::bytes(rows, blocks)));
        const Quantised rounded{rounded_.data(), blocks};
        pool_.run([&](int id) {
            int64_t begin, end;
            Team::share(rows, id, pool_.size(), &begin, &end);
            for (int64_t r = begin; r < end; r++)
                kernels_->quantise(x.data() + r * cols, blocks, rounded, int(r), 0, matrix.view().spread);
            pool_.team().barrier();
            Team::share(matrix.view().groups(), id, pool_.size(), &begin, &end);
            kernels_->gemm(matrix.view(), rounded, rows, int(begin), int(end), out.data(), matrix.view().rows, false);
        });
    }

    // Attention of q [rows, heads, d] over caches [slots, kv_heads, d] of float32 or float16, in which the rows' own
    // keys and values are stored. The step is described as for Model.run, with one cache group; mutual and first: as
    // StepView and GroupTables have them.
    void attend(const Heads& q, const Plane& keys, const Plane& values, const Vector<int64_t>& positions,
                const Vector<int64_t>& offsets, const Vector<int64_t>& starts, nb::object parents, int block_size,
                const Rows<int64_t>& table, const Vector<int64_t>& slots, int window, float scale, MutableHeads out,
                bool mutual, int64_t first) {
        const int rows = int(q.shape(0)), heads = int(q.shape(1)), d = int(q.shape(2)), kv_heads = int(keys.shape(1));
        const Cache cache = keys.dtype() == nb::dtype<float>() ? Cache::kF32 : Cache::kF16;
        check_plane(keys, cache, kv_heads, d);
        check_plane(values, cache, kv_heads, d);
        for (size_t axis = 0; axis < 3; axis++)
            if (out.shape(axis) != q.shape(axis)) throw std::invalid_argument("out must have the shape of q");
        Vector<int64_t> tree;
        StepView step = checked_step(positions, offsets, starts, parents, tree, block_size);
        if (step.rows != rows) throw std::invalid_argument("q must have one row per position");
        add_tables(step, table, slots, window, int64_t(std::min(keys.shape(0), values.shape(0))));
        if (mutual && step.parents != nullptr) throw std::invalid_argument("rows of trees cannot all see each other");
        if (first < 0) throw std::invalid_argument("the first position must not be negative");
        step.mutual = mutual;
        step.caches.back().first = first;
        const Planes planes{keys.data(), values.data(), nullptr, nullptr};
        nb::gil_scoped_release free;
        std::lock_guard<std::mutex> lock(mutex_);
        PagedAttention& attention = attention_for(heads, kv_heads, d, cache);
        if (rows == 0) return;
        attention.plan(step, pool_.size());
        const size_t width = size_t(heads) * size_t(d);
        scaled_.resize(std::max(scaled_.size(), size_t(rows) * width));
        PagedAttention::Tasks tasks;
        pool_.run([&](int id) {
            int64_t begin, end;
            Team::share(int64_t(size_t(rows) * width), id, pool_.size(), &begin, &end);
            for (int64_t i = begin; i < end; i++) scaled_[size_t(i)] = q.data()[i] * scale;
            pool_.team().barrier();
            attention.attend(pool_.team(), id, planes, 0, scaled_.data(), width, out.data(), tasks);
        });
    }

    int threads() const { return pool_.size(); }
    std::string kernels() const { return kernels_->name; }

  private:
    // The layers of a model share one: its scratch is kept.
    PagedAttention& attention_for(int heads, int kv_heads, int head_dim, Cache cache) {
        const std::array<int, 4> shape{heads, kv_heads, head_dim, int(cache)};
        if (!attention_ || shape != shape_) {
            attention_ = std::make_unique<PagedAttention>(heads, kv_heads, head_dim, cache, kernels_);
            shape_ = shape;
        }
        return *attention_;
    }

    const Kernels* kernels_;
    std::shared_ptr<Pool> shared_;
    Pool& pool_ = *shared_;
    std::mutex mutex_;  // one call at a time: the others wait
    std::vector<uint8_t> rounded_;
    std::vector<float> scaled_;
    std::array<int, 4> shape_{};
    std::unique_ptr<PagedAttention> attention_;
};

}  // namespace

void bind_workers(nb::module_& m) {
    nb::class_<Workers>(m, "Workers")
        .def(nb::init<int, const std::string&>(), "threads"_a, "kernels"_a = "")
        .def("linear", &Workers::linear, "matrix"_a, "x"_a.noconvert(), "out"_a.noconvert())
        .def("attend", &Workers::attend, "q"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(),
             "positions"_a.noconvert(), "offsets"_a.noconvert(), "starts"_a.noconvert(), "parents"_a.none(),
             "block_size"_a, "table"_a.noconvert(), "slots"_a.noconvert(), "window"_a, "scale"_a, "out"_a.noconvert(),
             "mutual"_a = false, "first"_a = 0)
        .def_prop_ro("threads", &Workers::threads)
        .def_prop_ro("kernels", &Workers::kernels);
}

}  // namespace paceline
