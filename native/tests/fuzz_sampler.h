// Exits 1 where a sample is not what the rules say.
#pragma once

namespace paceline {

void fuzz_sampler();

}  // namespace paceline
