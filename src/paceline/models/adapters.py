"""A PEFT adapter bound to a model's weights, ready to be added to the rows that have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from paceline.errors import ModelFormatError
from paceline.kernels.low_rank import LowRank
from paceline.kernels.packed import Weight
from paceline.models.layers import Linear
from paceline.models.load.adapters import Pair, PeftAdapter
from paceline.models.translate import Module

RANK_TILE = 16
"""Ranks are filled up with zeros to a multiple of this: matrix units want no less."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One of several that requests may name."""

    name: str
    revision: str
    """Identity of its contents: requests whose adapters have the same one may share cached blocks."""
    slot: int
    """Where its additions lie (kernels.low_rank.AdapterSlots)."""

    @property
    def identity(self) -> str:
        """For traces: its name, and what was loaded under it."""
        return f"{self.name}@{self.revision}"


def bind(name: str, adapter: PeftAdapter, linears: Iterable[Linear]) -> dict[Weight, LowRank]:
    """What an adapter adds to a model's weights. `linears`: those that can have additions. Refused with the
    names that differ where it does not fit."""
    linears = _called_as_in(adapter, linears)
    _check(name, adapter, linears)
    additions: dict[Weight, LowRank] = {}
    for linear in linears:
        own = [(first, _reordered(adapter.pairs[module.name], module)) for first, module in _places(linear)
               if module.name in adapter.pairs]
        if own:
            additions[linear.weight] = _stack(own, linear)
    return additions


def _called_as_in(adapter: PeftAdapter, linears: Iterable[Linear]) -> list[Linear]:
    """With the names that the adapter has for their modules: the first ones, or those which they have as a part of a
    model that also sees, where more of its factors are for those."""
    linears = list(linears)
    ways = range(min((len(module.names) for linear in linears for module in linear.modules), default=1))
    known = [sum(module.names[way] in adapter.pairs for linear in linears for module in linear.modules) for way in ways]
    way = known.index(max(known))
    return [Linear(linear.weight, linear.bias, [replace(module, names=(module.names[way],))
                                                for module in linear.modules], linear.held) for linear in linears]


def _places(linear: Linear) -> list[tuple[int, Module]]:
    """The modules that lie stacked in one weight, each with its first output."""
    places, first = [], 0
    for module in linear.modules:
        places.append((first, module))
        first += module.size
    return places


def _reordered(pair: Pair, module: Module) -> Pair:
    """With its outputs in the order in which the weight has them."""
    return pair if module.reorder is None else replace(pair, b=module.reorder(pair.b))


def _stack(pairs: Sequence[tuple[int, Pair]], linear: Linear) -> LowRank:
    """Several modules' factors as one pair for the weight they lie in: down has the rows of all, up a block for each
    where its outputs are. The zeros beside the blocks add nothing, to the bit."""
    weight, held = linear.weight, linear.held
    rank = sum(pair.a.shape[0] for _, pair in pairs)
    up = torch.zeros((held.shape[0], rank))
    column = 0
    for first, pair in pairs:
        size, own = pair.b.shape
        up[first:first + size, column:column + own] = pair.b * pair.scale
        column += own
    down = torch.cat([pair.a for _, pair in pairs])
    # Of a weight that lies split over ranks, what this one's part of it gets.
    up = up if held.rows is None else held.rows.of(up)
    down = down if held.columns is None else held.columns.of(down)
    spare = -rank % RANK_TILE
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else torch.float32
    return LowRank(F.pad(down, (0, 0, 0, spare)).to(weight.device, dtype),
                   F.pad(up, (0, spare)).to(weight.device, dtype))


def _check(name: str, adapter: PeftAdapter, linears: Sequence[Linear]) -> None:
    shapes = {module.name: (linear.held.shape[1], module.size) for linear in linears for module in linear.modules}
    unknown = sorted(module for module in adapter.pairs if module not in shapes)
    other = [f"'{module}' ({pair.a.shape[1]} to {pair.b.shape[0]}; the model's: {inputs} to {outputs})"
             for module, (inputs, outputs) in shapes.items() if (pair := adapter.pairs.get(module)) is not None
             and (pair.a.shape[1], pair.b.shape[0]) != (inputs, outputs)]
    missing = [module for module in shapes if module not in adapter.pairs and adapter.targets.take(module)]
    said = [f"{what} {_some(names)}" for what, names in (
        ("the model has no linear layer that takes an adapter named", [f"'{module}'" for module in unknown]),
        ("of another size are", other),
        ("nothing was found for", [f"'{module}'" for module in missing])) if names]
    if said:
        raise ModelFormatError(f"The adapter {name!r} ({adapter.path}) does not fit this model: {'; '.join(said)}. Use "
                               "an adapter that was trained on this very model.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
