"""TargetHeads: the trained heads of an engine's target. Every step that computes rows of the target stores what they
keep of them, whoever asked for drafts: who comes later may begin with the same text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.cache.storage import KVStorage
from paceline.engine.execute.waiting_rows import MOST, WaitingRows
from paceline.errors import ConfigError
from paceline.kernels.cpu.backend import NativeKernels
from paceline.kernels.device.lookup import MOST_HEADS
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.planes import Plane
from paceline.models.forward import Forward
from paceline.models.heads.config import BLOCK_KINDS
from paceline.models.heads.interface import Head, Opened, Planes, StoredRows
from paceline.models.heads.rows import slots_before

log = logging.getLogger("paceline.engine")

GROUP = 0
"""The cache group under whose tables heads keep what they keep: full attention, where there is any."""


def head_planes(heads: Mapping[str, Head], cache: torch.dtype, activations: torch.dtype) -> tuple[Plane, ...]:
    """All that they keep of a token, for a cache of this type under a model that computes in `activations`."""
    return tuple(Plane(f"{name}.{plane.name}", plane.shape, plane.dtype, GROUP)
                 for name, head in heads.items() for plane in head.planes(cache, activations))


class TargetHeads:
    """Those of one engine, over the storage that was made with their planes."""

    def __init__(self, heads: Mapping[str, Head], storage: KVStorage, kernels: Kernels) -> None:
        """`kernels`: what they run with."""
        if len(heads) > MOST_HEADS:
            raise ConfigError(f"An engine can have {MOST_HEADS} trained heads at most, got {len(heads)}.")
        self.heads = dict(heads)
        self.kernels = kernels
        self.lost: dict[str, Exception] = {}
        """Those that have raised as a part of a step, with what they raised: they are not run any more, and what they
        keep is not kept up."""
        self._storage = storage
        self.taps = frozenset(tap for head in heads.values() for tap in head.config.taps)
        self._planes: dict[str, Planes] = {
            name: {plane.removeprefix(f"{name}."): tensor for plane, tensor in storage.extra.items()
                   if plane.startswith(f"{name}.")} for name in heads}
        self._looks_back = any(head.config.kind not in BLOCK_KINDS for head in heads.values())
        """Whether what is kept of a token is made of what the one before it left."""
        self._waiting: WaitingRows | None = None
        """None: what is kept of rows is written by the step that has run them."""
        if isinstance(kernels, NativeKernels) and heads and not self._looks_back:
            self._waiting = WaitingRows()
            storage.before_transfer = self.settle
        self._nowhere = torch.empty(0, dtype=torch.int64)
        """In place of where that lies, which then nobody reads."""

    def number(self, name: str) -> int:
        """By which a device tells them apart, from 1 on."""
        return 1 + list(self.heads).index(name)

    def kind(self, number: int) -> str:
        return list(self.heads.values())[number - 1].config.kind

    def planes(self, name: str) -> Planes:
        return self._planes[name]

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """While a head runs as a part of everybody's step: when it raises it is lost, and the step goes on. Without
        memory for it the step is what is too large."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            if name not in self.lost:
                log.warning("the trained head %s failed and is not used any more: %s: %s", name,
                            type(problem).__name__, problem, exc_info=problem)
                self.lost[name] = problem

    @property
    def lost_numbers(self) -> dict[int, Exception]:
        return {self.number(name): problem for name, problem in self.lost.items()}

    @property
    def capturable(self) -> bool:
        return all(head.capturable for head in self.heads.values())

    def store(self, tokens: torch.Tensor, context: Forward) -> None:
        """A forward of the target has run over these tokens, with `taps`: keep what is to be kept of its rows, now or
        when it is needed."""
        if not self.heads:
            return
        layout = context.layout
        view = layout.views[GROUP]
        before = slots_before(layout, view) if self._looks_back else self._nowhere
        rows = StoredRows(tokens, layout, view, before)
        if self._waiting is None or len(tokens) >= MOST:  # many at once gain nothing by waiting
            self.settle()
            self._store(context.tapped, rows)
            return
        self._waiting.add({tap: context.tapped[tap] for tap in self.taps}, rows)
        if self._waiting.full:
            self.settle()

    def settle(self) -> None:
        """Before somebody reads, moves or copies what is kept of rows that have run: all of it is written."""
        if self._waiting is None:
            return
        try:
            taken = self._waiting.take()
        except Exception:
            # Those rows are never stored: what is kept of their texts is not whole any more.
            for name in self.heads:
                with self.guarded(name):
                    raise
            return
        if taken is not None:
            self._store(*taken)

    @torch.inference_mode()
    def _store(self, tapped: Mapping[int, torch.Tensor], rows: StoredRows) -> None:
        for name, head in self.heads.items():
            if name not in self.lost:
                with self.guarded(name):
                    head.store({tap: tapped[tap] for tap in head.config.taps}, rows, self._planes[name], self.kernels)

    @torch.inference_mode()
    def try_out(self, longest: int, activations: torch.dtype) -> None:
        """Before the first request, of texts of up to `longest` tokens: let each head store what a text of two tokens
        leaves, and draft a token. One that cannot is refused."""
        for name, head in self.heads.items():
            try:
                end = self._try(name, head, longest, activations)
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:
                raise ConfigError(f"The trained head {name!r} cannot run with this model here ({type(problem).__name__}"
                                  f": {problem}): leave it out, or choose another one.") from problem
            for plane in self._planes[name].values():
                plane[self._storage.block_size:][:end].zero_()

    def _try(self, name: str, head: Head, longest: int, activations: torch.dtype) -> int:
        """In the first blocks that can be held; how many positions were written to, at most."""
        size = self._storage.block_size
        planes = self._planes[name]
        device = next(iter(self._storage.extra.values())).device
        longest = min(longest, head.config.max_position_embeddings) if head.config.attends else longest
        table = torch.arange(1, next(iter(planes.values())).shape[0] // size, device=device)[None]
        room = min(longest, size * table.shape[1])

        def layout(first: int, rows: int, mutual: bool = False) -> Layout:
            places = torch.arange(first, first + rows, device=device)
            view = GroupView(table, table[0, places // size] * size + places % size, self._storage.groups[GROUP].window)
            return Layout(places, [0, rows], [first], [None], size, [view], mutual=mutual)

        stored = layout(0, min(2, room))
        rows = StoredRows(torch.zeros_like(stored.positions), stored, stored.views[0],
                          slots_before(stored, stored.views[0]))
        streams = torch.zeros(stored.rows, head.config.hidden_size, dtype=activations, device=device)
        head.store(dict.fromkeys(head.config.taps, streams), rows, planes, self.kernels)
        passes = head.passes(1)
        if any(room < 3 + one.first for one in passes):
            return stored.rows
        anchors = torch.zeros(1, dtype=torch.int64, device=device)
        opened = Opened(anchors, stored.views[0].slots[-1:], [
            layout(2 + one.first, min(one.rows, room - 2 - one.first), one.mutual) for one in passes], 1)
        head.open(opened, planes, self.kernels).logits(anchors)
        return 2 + max((one.first + one.rows for one in passes), default=0)


def no_heads(storage: KVStorage, kernels: Kernels) -> TargetHeads:
    """Of models that have none, which cost nothing."""
    return TargetHeads({}, storage, kernels)
