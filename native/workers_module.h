// Binds Workers.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_workers(nanobind::module_& m);

}  // namespace paceline
