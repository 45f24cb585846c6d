// Binds SuffixTree, its texts and what it finds.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_suffix(nanobind::module_& m);

}  // namespace paceline
