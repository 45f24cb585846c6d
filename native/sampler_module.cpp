// The sampler's Python boundary: shapes, dtypes and values are checked here, so that a mistake is an exception.
#include "sampler_module.h"

#include <nanobind/ndarray.h>

#include <cmath>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

template <class T> using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using MutableVector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

// Parameters of a list of rows, checked and copied once for as long as the list stays the same.
class SampleTable {
  public:
    SampleTable(const Vector<int64_t>& kind, const Vector<float>& temperature, const Vector<int64_t>& top_k,
                const Vector<double>& top_p, const Vector<double>& log_min_p, const Vector<uint64_t>& seed) {
        const size_t count = kind.shape(0);
        require(temperature.shape(0) == count && top_k.shape(0) == count && top_p.shape(0) == count &&
                    log_min_p.shape(0) == count && seed.shape(0) == count,
                "every parameter must have one value a row");
        for (size_t i = 0; i < count; i++) {
            require(kind(i) >= 0 && kind(i) <= 2, "a kind must be 0 (greedy), 1 (truncated) or 2 (open)");
            require(temperature(i) > 0.0f && std::isfinite(temperature(i)), "a temperature must be above 0 and finite");
            require(top_k(i) >= 1, "top_k must be at least 1");
            require(top_p(i) > 0.0 && top_p(i) <= 1.0, "top_p must be above 0 and at most 1");
            require(log_min_p(i) <= 0.0, "log_min_p must be at most 0");
            rows_.push_back({SampleKind(kind(i)), temperature(i), top_k(i), top_p(i), log_min_p(i), seed(i)});
        }
    }

    size_t size() const { return rows_.size(); }
    const SampleParams& at(int64_t row) const {
        require(row >= 0 && size_t(row) < rows_.size(), "a row lies outside the table");
        return rows_[size_t(row)];
    }

  private:
    std::vector<SampleParams> rows_;
};

// A Sampler that several Python threads may hold: they take turns.
class SharedSampler {
  public:
    explicit SharedSampler(int64_t width) : sampler_(checked(width)) {}

    void sample(const SampleTable& table, const Logits& logits, const Vector<int64_t>& at, const Vector<int64_t>& rows,
                const Vector<int64_t>& positions, MutableVector<int64_t> tokens, MutableVector<float> top) {
        const size_t all = table.size(), count = rows.shape(0);
        require(logits.shape(1) == size_t(sampler_.width()), "logits must be as wide as the sampler");
        require(at.shape(0) == count, "there must be one row of logits for each row of the table");
        require(positions.shape(0) == all && tokens.shape(0) == all && top.shape(0) == all,
                "positions, tokens and top must have one value for each row of the table");
        for (size_t i = 0; i < count; i++) {
            table.at(rows(i));
            require(at(i) >= 0 && size_t(at(i)) < logits.shape(0), "a row lies outside the logits");
        }
        nb::gil_scoped_release free;
        const std::lock_guard<std::mutex> turn(mutex_);
        for (size_t i = 0; i < count; i++) {
            const size_t row = size_t(rows(i));
            const float* x = logits.data() + size_t(at(i)) * logits.shape(1);
            tokens(row) = sampler_.sample(x, table.at(rows(i)), positions(row), top(row));
        }
    }

    nb::tuple support(const SampleTable& table, int64_t row, const Vector<float>& logits) {
        require(logits.shape(0) == size_t(sampler_.width()), "logits must be as wide as the sampler");
        const SampleParams& params = table.at(row);
        const std::lock_guard<std::mutex> turn(mutex_);
        const int64_t count = sampler_.support(logits.data(), params);
        auto* tokens = new int64_t[size_t(count)];
        const nb::capsule tokens_owner(tokens, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
        auto* scores = new float[size_t(count)];
        const nb::capsule scores_owner(scores, [](void* p) noexcept { delete[] static_cast<float*>(p); });
        for (int64_t i = 0; i < count; i++) {
            tokens[i] = sampler_.token(i);
            scores[i] = sampler_.score(i);
        }
        return nb::make_tuple(
            nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(tokens, {size_t(count)}, tokens_owner),
            nb::ndarray<nb::numpy, float, nb::ndim<1>>(scores, {size_t(count)}, scores_owner));
    }

    int64_t width() const { return sampler_.width(); }

  private:
    static int64_t checked(int64_t width) {
        require(width >= 1 && width <= int64_t(1) << 30, "a vocabulary has at least 1 and at most 2^30 tokens");
        return width;
    }

    Sampler sampler_;
    std::mutex mutex_;
};

// Bits and Gumbel noise of tokens at one position, one by one, or (`grouped`) as they come when four quads are made together.
void token_noise(uint64_t seed, int64_t position, const Vector<int64_t>& tokens, MutableVector<uint32_t> bits,
                 MutableVector<float> noise, bool grouped) {
    require(bits.shape(0) == tokens.shape(0) && noise.shape(0) == tokens.shape(0), "one value of each kind a token");
    const Noise source(seed, position);
    for (size_t i = 0; i < tokens.shape(0); i++) {
        require(tokens(i) >= 0 && tokens(i) < int64_t(1) << 32, "a token id must be at least 0 and below 2^32");
        const auto token = uint32_t(tokens(i));
        bits(i) = source.bits(token);
        if (grouped) {
            Words words[1][4];
            const uint32_t quads[4] = {0, 1, token / kQuad, 3};
            source.bits<1>(quads, words);
            bits(i) = words[0][token % kQuad][2];
        }
        noise(i) = gumbel(bits(i));
    }
}

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<SampleTable>(m, "SampleTable")
        .def(nb::init<const Vector<int64_t>&, const Vector<float>&, const Vector<int64_t>&, const Vector<double>&,
                      const Vector<double>&, const Vector<uint64_t>&>(),
             "kind"_a.noconvert(), "temperature"_a.noconvert(), "top_k"_a.noconvert(), "top_p"_a.noconvert(),
             "log_min_p"_a.noconvert(), "seed"_a.noconvert());
    nb::class_<SharedSampler>(m, "Sampler")
        .def(nb::init<int64_t>(), "width"_a)
        .def("sample", &SharedSampler::sample, "table"_a, "logits"_a.noconvert(), "at"_a.noconvert(),
             "rows"_a.noconvert(), "positions"_a.noconvert(), "tokens"_a.noconvert(), "top"_a.noconvert())
        .def("support", &SharedSampler::support, "table"_a, "row"_a, "logits"_a.noconvert())
        .def_prop_ro("width", &SharedSampler::width);
    m.def("token_noise", &token_noise, "seed"_a, "position"_a, "tokens"_a.noconvert(), "bits"_a.noconvert(),
          "noise"_a.noconvert(), "grouped"_a = false);
}

}  // namespace paceline
