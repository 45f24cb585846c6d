// The Markov head's Python boundary: shapes and ids are checked here, so that a mistake is an exception.
#include "markov_module.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "boundary.h"
#include "markov.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Blocks = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

int best(Markov& self, const Blocks& base, const Blocks& hidden, const Blocks& further, const Rows<int64_t>& further_ids,
         const Vector<int64_t>& previous, const Vector<float>& temperatures, const Vector<uint64_t>& seeds,
         const Vector<int64_t>& positions, const Vector<float>& least, MutableRows<int64_t> tokens, MutableRows<float> chances) {
    if (base.shape(2) != size_t(self.width())) throw std::invalid_argument("logits must be as wide as the draft vocabulary");
    if (hidden.shape(0) != base.shape(0) || hidden.shape(1) != base.shape(1) || hidden.shape(2) != size_t(self.hidden()))
        throw std::invalid_argument("hidden must be [lines, slots, hidden]");
    if (previous.shape(0) != base.shape(0) || least.shape(0) != base.shape(0))
        throw std::invalid_argument("one token before each line, and one least chance");
    if (temperatures.shape(0) != base.shape(0) || seeds.shape(0) != base.shape(0) || positions.shape(0) != base.shape(0))
        throw std::invalid_argument("a temperature, a seed and a position for each line");
    std::vector<Draw> draws(base.shape(0));
    for (size_t line = 0; line < draws.size(); line++) {
        draws[line] = {temperatures.data()[line], seeds.data()[line], positions.data()[line]};
        if (!(std::isfinite(draws[line].temperature) && draws[line].temperature >= 0.0f))
            throw std::invalid_argument("a temperature must be finite and at least 0");
        if (draws[line].position < 0 || draws[line].position > std::numeric_limits<int32_t>::max())
            throw std::invalid_argument("no text is that long");
    }
    if (tokens.shape(0) != base.shape(0) || tokens.shape(1) != base.shape(1) || chances.shape(0) != base.shape(0)
        || chances.shape(1) != base.shape(1))
        throw std::invalid_argument("tokens and chances must be [lines, slots]");
    if (further.shape(0) != base.shape(0) || further.shape(1) != base.shape(1) || further_ids.shape(0) != base.shape(0)
        || further_ids.shape(1) != further.shape(2))
        throw std::invalid_argument("further must be [lines, slots, tokens], with an id for each line's tokens");
    const auto check = [&](const int64_t* ids, size_t count) {
        for (size_t i = 0; i < count; i++)
            if (ids[i] < 0 || ids[i] >= self.target_tokens()) throw std::invalid_argument("an id has no row");
    };
    check(previous.data(), previous.size());
    check(further_ids.data(), further_ids.size());
    nb::gil_scoped_release free;
    return self.best(base.data(), hidden.data(), {further.data(), further_ids.data(), int(further.shape(2))},
                     int(base.shape(0)), int(base.shape(1)), previous.data(), draws.data(), least.data(), tokens.data(),
                     chances.data());
}

}  // namespace

void bind_markov(nb::module_& m) {
    nb::class_<Markov>(m, "Markov")
        .def("__init__", [](Markov* self, std::shared_ptr<Matrix> first, std::shared_ptr<Matrix> second, int width,
                            const Vector<int64_t>& ids, const Vector<float>& of_hidden, const Vector<float>& of_token,
                            float bias, float eps, int threads, const std::string& kernels) {
            if (threads < 1) throw std::invalid_argument("threads must be at least 1");
            Confidence confidence{{of_hidden.data(), of_hidden.data() + of_hidden.size()},
                                  {of_token.data(), of_token.data() + of_token.size()}, bias, eps};
            new (self) Markov(std::move(first), std::move(second), width, {ids.data(), ids.data() + ids.size()},
                              std::move(confidence), kernels_named(kernels), threads);
        }, "first"_a, "second"_a, "width"_a, "ids"_a.noconvert(), "of_hidden"_a.noconvert(), "of_token"_a.noconvert(),
             "bias"_a, "eps"_a, "threads"_a, "kernels"_a = "")
        .def("best", &best, "base"_a.noconvert(), "hidden"_a.noconvert(), "further"_a.noconvert(),
             "further_ids"_a.noconvert(), "previous"_a.noconvert(), "temperatures"_a.noconvert(), "seeds"_a.noconvert(),
             "positions"_a.noconvert(), "least"_a.noconvert(), "tokens"_a.noconvert(), "chances"_a.noconvert());
}

}  // namespace paceline
