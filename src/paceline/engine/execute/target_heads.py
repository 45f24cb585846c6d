"""TargetHeads: the trained heads of an engine's target. Every step that computes rows of the target stores what they
keep of them, whoever asked for drafts: who comes later may begin with the same text."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.cache.storage import KVStorage
from paceline.errors import ConfigError
from paceline.kernels.device.lookup import MOST_HEADS
from paceline.kernels.interface import Kernels
from paceline.kernels.planes import Plane
from paceline.models.forward import Forward
from paceline.models.heads.config import BLOCK_KINDS
from paceline.models.heads.interface import Head, Planes, StoredRows
from paceline.models.heads.rows import slots_before

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
        self.taps = frozenset(tap for head in heads.values() for tap in head.config.taps)
        self._planes: dict[str, Planes] = {
            name: {plane.removeprefix(f"{name}."): tensor for plane, tensor in storage.extra.items()
                   if plane.startswith(f"{name}.")} for name in heads}
        self._looks_back = any(head.config.kind not in BLOCK_KINDS for head in heads.values())
        """Whether what is kept of a token is made of what the one before it left."""

    def number(self, name: str) -> int:
        """By which a device tells them apart, from 1 on."""
        return 1 + list(self.heads).index(name)

    def planes(self, name: str) -> Planes:
        return self._planes[name]

    @property
    def capturable(self) -> bool:
        return all(head.capturable for head in self.heads.values())

    def store(self, tokens: torch.Tensor, context: Forward) -> None:
        """A forward of the target has run over these tokens, with `taps`: keep what is to be kept of its rows."""
        if not self.heads:
            return
        layout = context.layout
        view = layout.views[GROUP]
        before = slots_before(layout, view) if self._looks_back else tokens.new_empty(0)
        rows = StoredRows(tokens, layout, view, before)
        for name, head in self.heads.items():
            head.store({tap: context.tapped[tap] for tap in head.config.taps}, rows, self._planes[name], self.kernels)


def no_heads(storage: KVStorage, kernels: Kernels) -> TargetHeads:
    """Of models that have none, which cost nothing."""
    return TargetHeads({}, storage, kernels)
