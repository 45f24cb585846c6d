// What the Python boundary checks everywhere alike: a mistake there is an exception, never a crash.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "attention.h"

namespace paceline {

template <class T> using Vector = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T> using Rows = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <class T> using MutableRows = nanobind::ndarray<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
using Plane = nanobind::ndarray<nanobind::ndim<3>, nanobind::c_contig, nanobind::device::cpu>;

Cache cache_named(const std::string& name);

// The table of that name, "" being the best one; an error where it cannot run.
const Kernels* kernels_named(const std::string& name);

// Fails unless x is [slots, kv_heads, head_dim] of that type.
void check_plane(const Plane& x, Cache cache, int kv_heads, int head_dim);

// A step without its caches. `parents` is None or an array, which `tree` then holds; all of them must outlive the view.
StepView checked_step(const Vector<int64_t>& positions, const Vector<int64_t>& offsets, const Vector<int64_t>& starts,
                      nanobind::handle parents, Vector<int64_t>& tree, int block_size);

// One more cache group of the step, its planes having `limit` slots.
void add_tables(StepView& step, const Rows<int64_t>& tables, const Vector<int64_t>& slots, int window, int64_t limit);

}  // namespace paceline
