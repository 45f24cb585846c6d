// Binds Markov.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_markov(nanobind::module_& m);

}  // namespace paceline
