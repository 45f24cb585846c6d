// Exits 1 where a Markov head picks another token than a plain reading of its matrices.
#pragma once

#include "../kernels.h"

namespace paceline {

void fuzz_markov(const Kernels* table);

}  // namespace paceline
