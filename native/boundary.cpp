#include "boundary.h"

#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace paceline {

Cache cache_named(const std::string& name) {
    if (name == "float32") return Cache::kF32;
    if (name == "float16") return Cache::kF16;
    if (name == "int8") return Cache::kI8;
    throw std::invalid_argument("unknown cache type " + name + ": use float32, float16 or int8");
}

const Kernels* kernels_named(const std::string& name) {
    const Kernels* found = name.empty() ? best_kernels() : kernels_by_name(name.c_str());
    if (found == nullptr) throw std::invalid_argument("the kernels '" + name + "' cannot run on this machine");
    return found;
}

void check_plane(const Plane& x, Cache cache, int kv_heads, int head_dim) {
    const auto want = cache == Cache::kF32 ? nb::dtype<float>() : nb::dtype<int8_t>();
    const bool half = x.dtype().code == uint8_t(nb::dlpack::dtype_code::Float) && x.dtype().bits == 16;
    if (cache == Cache::kF16 ? !half : x.dtype() != want)
        throw std::invalid_argument("a cache has another dtype than was said");
    if (x.shape(1) != size_t(kv_heads) || x.shape(2) != size_t(head_dim))
        throw std::invalid_argument("a cache must be [slots, kv_heads, head_dim]");
}

StepView checked_step(const Vector<int64_t>& positions, const Vector<int64_t>& offsets, const Vector<int64_t>& starts,
                      nb::handle parents, Vector<int64_t>& tree, int block_size) {
    StepView step;
    step.rows = int(positions.shape(0));
    step.groups = int(starts.shape(0));
    step.block_size = block_size;
    step.positions = positions.data();
    step.offsets = offsets.data();
    step.starts = starts.data();
    if (block_size < 1) throw std::invalid_argument("block_size must be at least 1");
    if (offsets.shape(0) != starts.shape(0) + 1 || offsets(0) != 0 || offsets(size_t(step.groups)) != step.rows)
        throw std::invalid_argument("offsets must run from 0 to the number of rows, one more than there are groups");
    if (!parents.is_none()) {
        tree = nb::cast<Vector<int64_t>>(parents, false);
        if (tree.shape(0) != size_t(step.rows)) throw std::invalid_argument("parents must have one entry per row");
        step.parents = tree.data();
    }
    for (int g = 0; g < step.groups; g++)  // all of them first: rows are read by these
        if (offsets(size_t(g) + 1) < offsets(size_t(g)) || starts(size_t(g)) < 0)
            throw std::invalid_argument("offsets must not fall and starts must not be negative");
    std::vector<int64_t> depths(size_t(step.rows));
    for (int g = 0; g < step.groups; g++) {
        int64_t* depth = depths.data() + step.offsets[g];
        for (int64_t i = 0; i < step.offsets[g + 1] - step.offsets[g]; i++) {
            const int64_t row = step.offsets[g] + i, parent = step.parents == nullptr ? i - 1 : step.parents[row];
            if (parent < -1 || parent >= i) throw std::invalid_argument("parents must come before their children");
            depth[i] = parent < 0 ? 0 : depth[parent] + 1;
            if (step.positions[row] != step.starts[g] + depth[i])
                throw std::invalid_argument("a row's position must be its group's start and its depth together");
        }
    }
    return step;
}

void add_tables(StepView& step, const Rows<int64_t>& tables, const Vector<int64_t>& slots, int window, int64_t limit) {
    if (window < 0) throw std::invalid_argument("a window must not be negative");
    if (tables.shape(0) != size_t(step.groups) || slots.shape(0) != size_t(step.rows))
        throw std::invalid_argument("a table must have one row per group, slots one entry per row");
    const int64_t width = int64_t(tables.shape(1)), blocks = limit / step.block_size;
    for (int g = 0; g < step.groups; g++) {
        const int64_t rows = step.offsets[g + 1] - step.offsets[g];
        if (step.starts[g] > width * step.block_size - rows)
            throw std::invalid_argument("a group is longer than its block table");
        const int64_t held = (step.starts[g] + rows + step.block_size - 1) / step.block_size;
        for (int64_t b = 0; b < held; b++) {
            const int64_t block = tables(size_t(g), size_t(b));
            if (block < 0 || block >= blocks) throw std::invalid_argument("a block table names a block that does not exist");
        }
    }
    for (int r = 0; r < step.rows; r++)
        if (slots(size_t(r)) < 0 || slots(size_t(r)) >= limit) throw std::invalid_argument("a slot lies outside the cache");
    step.caches.push_back({tables.data(), width, slots.data(), window});
}

}  // namespace paceline
