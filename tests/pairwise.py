"""Long products of circumstances, cut: every two values of different axes meet in some cell of every run, and the whole
product is run by `make test-full`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]
Cell = tuple[int, ...]


def pairwise(*, indirect: Sequence[str] = (), **axes: Axis) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations of the axes' values (by name, or with the names they have); those that a
    cut in pairs does not need are marked `full`. `indirect`: axes that are parameters of fixtures."""
    return _parametrised(cut, indirect, axes)


def each(*, indirect: Sequence[str] = (), **axes: Axis) -> pytest.MarkDecorator:
    """The same, for what has little to do with one another: every run meets every value of every axis."""
    return _parametrised(lambda sizes: {tuple(turn % size for size in sizes) for turn in range(max(sizes))}, indirect,
                         axes)


def _parametrised(cut: Callable[[Sequence[int]], set[Cell]], indirect: Sequence[str],
                  axes: Mapping[str, Axis]) -> pytest.MarkDecorator:
    named = [dict(axis) if isinstance(axis, Mapping) else {_name(value): value for value in axis}
             for axis in axes.values()]
    kept = cut([len(axis) for axis in named])
    params = []
    for cell in itertools.product(*(range(len(axis)) for axis in named)):
        chosen = [list(axis.items())[index] for axis, index in zip(named, cell)]
        marks = [mark for _, value in chosen for mark in getattr(value, "marks", ())]
        params.append(pytest.param(*(_bare(value) for _, value in chosen), id="-".join(name for name, _ in chosen),
                                   marks=marks if cell in kept else [*marks, pytest.mark.full]))
    return pytest.mark.parametrize(tuple(axes), params, indirect=list(indirect))


def _bare(value: Any) -> Any:
    """Of what pytest.param made, if it did."""
    return value.values[0] if hasattr(value, "marks") else value


def _name(value: Any) -> str:
    return str(getattr(_bare(value), "name", _bare(value)))


def cut(sizes: Sequence[int]) -> set[Cell]:
    """Few cells of a product of axes of these sizes, such that every two values of different axes meet in one."""
    cells = list(itertools.product(*map(range, sizes)))
    missing = {pair for cell in cells for pair in pairs(cell)}
    kept: set[Cell] = set()
    while missing:
        best = max(cells, key=lambda cell: sum(pair in missing for pair in pairs(cell)))
        kept.add(best)
        missing -= pairs(best)
    return kept or set(cells)


def pairs(cell: Cell) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(cell), 2))
