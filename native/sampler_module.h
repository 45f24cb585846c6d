// Binds Sampler, SampleTable and token_noise.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_sampler(nanobind::module_& m);

}  // namespace paceline
