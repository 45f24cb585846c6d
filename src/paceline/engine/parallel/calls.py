"""What rank 0 has the others do: each call is made by all ranks in the same order, each on its own share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from paceline.cache.host_storage import HostStorage
from paceline.cache.storage import KVStorage
from paceline.cache.transfers import BlockCopy, Route, SlotMove
from paceline.errors import EngineError
from paceline.kernels.adapted import adapted, slots_of
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import AdapterSlots
from paceline.models.adapters import bind
from paceline.models.decoder import Decoder
from paceline.models.forward import Forward
from paceline.models.interface import CausalLM
from paceline.models.load.adapters import PeftAdapter
from paceline.parallel.communicator import Communicator

Tensors = Sequence[torch.Tensor]
Described = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and types of the tensors that come with a call."""


class Share:
    """What a rank besides rank 0 has: its part of the model, and of what is kept of every token."""

    def __init__(self, model: CausalLM, kernels: Kernels, device: torch.device) -> None:
        self.model = model
        self.kernels = kernels
        self.device = device
        self.adapters = AdapterSlots()
        self._storage: KVStorage | None = None

    def kernels_for(self, slots: torch.Tensor | None) -> Kernels:
        """For a step whose rows have these adapters."""
        return adapted(self.kernels, self.adapters, slots)

    @property
    def storage(self) -> KVStorage:
        assert self._storage is not None, "a forward before there is a cache"
        return self._storage

    @storage.setter
    def storage(self, storage: KVStorage) -> None:
        self._storage = storage

    def forget_storage(self) -> None:
        self._storage = None


class Call(Protocol):
    """Picklable; tensors travel beside it."""

    def carry_out(self, share: Share, tensors: Tensors) -> None: ...


@dataclass(frozen=True, slots=True)
class Allocate:
    """The cache has been made."""

    num_blocks: Sequence[int]
    block_size: int
    dtype: torch.dtype

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.forget_storage()  # of an engine that was tried before: there may be no room for both
        share.storage = KVStorage(share.model.cache_groups, self.num_blocks, self.block_size, self.dtype, share.device)


@dataclass(frozen=True, slots=True)
class AddHost:
    """There is host memory for copies on these routes."""

    routes: Sequence[Route]
    num_blocks: int

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        storage = share.storage
        storage.add_host(self.routes, HostStorage(storage.planes, storage.block_size, self.num_blocks, share.device))


@dataclass(frozen=True, slots=True)
class Apply:
    """KVStorage.apply."""

    moves: Sequence[SlotMove]
    copies: Sequence[BlockCopy]

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.storage.apply(self.moves, self.copies)


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Into the slot that rank 0 has just given it: all ranks load and free in the same order. A rank whose slots are
    others (rank 0 was interrupted between loading and telling) ends, for rows would get another's adapter there."""

    name: str
    adapter: PeftAdapter
    slot: int

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        slot = share.adapters.load(bind(self.name, self.adapter, share.model.linears()))
        if slot != self.slot:
            raise EngineError(f"The adapter {self.name!r} is in slot {self.slot} of rank 0 and in slot {slot} here.")


@dataclass(frozen=True, slots=True)
class FreeAdapter:
    slot: int

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.adapters.free(self.slot)


@dataclass(frozen=True, slots=True)
class Embed:
    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.model.embed(tensors[0])


@dataclass(frozen=True, slots=True)
class WholeHead:
    """Decoder.whole_head."""

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        cast(Decoder, share.model).whole_head()


@dataclass(frozen=True, slots=True)
class Logits:
    """CausalLM.logits; where a row has an adapter, the slots of all of them come along."""

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.model.logits(tensors[0], share.kernels_for(tensors[1] if len(tensors) > 1 else None))


@dataclass(frozen=True, slots=True)
class Pass:
    """A Forward but for its tensors and what each rank has of its own. What is tapped, rank 0 taps."""

    offsets: Sequence[int]
    starts: Sequence[int]
    parents: Sequence[Sequence[int] | None]
    block_size: int
    mutual: bool
    views: Sequence[tuple[int | None, int]]
    """Of each cache group its window and the first position that holds something."""
    skip: frozenset[tuple[int, str]]
    leaving: bool
    adapters: bool

    @classmethod
    def of(cls, context: Forward) -> tuple[Pass, list[torch.Tensor]]:
        """With the tensors, which `context` is made of again."""
        layout = context.layout
        tensors = [layout.positions]
        for view in layout.views:
            tensors += [view.tables, view.slots]
        slots = slots_of(context.kernels)
        tensors += [extra for extra in (context.leaving, slots) if extra is not None]
        return cls(layout.offsets, layout.starts, layout.parents, layout.block_size, layout.mutual,
                   [(view.window, view.first) for view in layout.views], context.skip,
                   context.leaving is not None, slots is not None), tensors

    def context(self, share: Share, tensors: Tensors) -> Forward:
        storage = share.storage
        views = [GroupView(tensors[1 + 2 * place], tensors[2 + 2 * place], window, first=first)
                 for place, (window, first) in enumerate(self.views)]
        layout = Layout(tensors[0], list(self.offsets), list(self.starts),
                        [None if tree is None else list(tree) for tree in self.parents], self.block_size, views,
                        mutual=self.mutual)
        more = iter(tensors[1 + 2 * len(self.views):])
        leaving = next(more) if self.leaving else None
        kernels = share.kernels_for(next(more) if self.adapters else None)
        return Forward(kernels, layout, storage.keys, storage.values, share.model.cache_groups, skip=self.skip,
                       leaving=leaving, key_scales=storage.key_scales, value_scales=storage.value_scales)


@dataclass(frozen=True, slots=True)
class Whole:
    """CausalLM.forward."""

    run: Pass

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.model.forward(tensors[0], self.run.context(share, tensors[1:]))


@dataclass(frozen=True, slots=True)
class Layers:
    """CausalLM.layers."""

    run: Pass
    first: int
    last: int | None

    def carry_out(self, share: Share, tensors: Tensors) -> None:
        share.model.layers(tensors[0], self.run.context(share, tensors[1:]), self.first, self.last)


def described(tensors: Tensors) -> Described:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def send(ranks: Communicator, tensors: Tensors) -> None:
    """Rank 0: all of one type as one message."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        ranks.broadcast(torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dtype == dtype]))


def receive(ranks: Communicator, described: Described, device: torch.device) -> list[torch.Tensor]:
    """The others: those tensors."""
    flat: Mapping[torch.dtype, list[torch.Tensor]] = {
        dtype: _received(ranks, [shape for shape, own in described if own == dtype], dtype, device)
        for dtype in dict.fromkeys(dtype for _, dtype in described)}
    return [flat[dtype].pop(0) for _, dtype in described]


def _received(ranks: Communicator, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype,
              device: torch.device) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    whole = torch.empty(sum(sizes), dtype=dtype, device=device)
    ranks.broadcast(whole)
    return [part.view(shape) for part, shape in zip(torch.split(whole, sizes), shapes)]
