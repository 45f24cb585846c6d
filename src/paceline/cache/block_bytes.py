"""BlockBytes: the content of whole blocks of a cache, all planes side by side, as other engines can read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.cache.host_storage import by_block
from paceline.cache.storage import KVStorage


class PlaneFormat(NamedTuple):
    """One of the tensors that hold something of every token."""

    name: str
    dtype: str
    bytes: int
    """Of a block."""
    extra: bool
    """Somebody keeps it beside the target's keys and values; the text does not depend on it."""


class BlockBytes:
    """Reads and writes blocks of one storage between steps, when all that was submitted is under way."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        names = {id(tensor): f"{kind} {layer}" for kind, seen in (
            ("key", storage.keys), ("value", storage.values), ("key scale", storage.key_scales),
            ("value scale", storage.value_scales)) for layer, tensor in reversed(seen.items())}
        extra = {id(tensor): name for name, tensor in storage.extra.items()}
        self._planes = [[by_block(plane, storage.block_size) for plane in own] for own in storage.planes]
        self.formats = [[PlaneFormat(extra.get(id(plane)) or names[id(plane)],
                                     str(plane.dtype).removeprefix("torch."), blocks.shape[1], id(plane) in extra)
                         for plane, blocks in zip(own, by_blocks)]
                        for own, by_blocks in zip(storage.planes, self._planes)]
        """Of each group its planes, in the order in which their bytes lie."""

    def read(self, group: int, blocks: Sequence[int], names: Sequence[str]) -> torch.Tensor:
        """[blocks, bytes] uint8 where the cache is, of the planes with these names, in their order."""
        self._settle()
        index = torch.tensor(blocks, dtype=torch.int64, device=self._storage.device)
        by_name = self._by_name(group)
        return torch.cat([by_name[name].index_select(0, index) for name in names], dim=1)

    def write(self, group: int, blocks: Sequence[int], data: torch.Tensor, names: Sequence[str]) -> None:
        """The other way round. Planes that do not come are zero from now on: what they held was another text's."""
        self._settle()
        at, left = 0, self._by_name(group)
        for name in names:
            plane = left.pop(name)
            _assign(plane, blocks, data[:, at:at + plane.shape[1]].to(plane.device))
            at += plane.shape[1]
        for plane in left.values():
            _assign(plane, blocks, torch.zeros((len(blocks), plane.shape[1]), dtype=torch.uint8, device=plane.device))

    def _by_name(self, group: int) -> dict[str, torch.Tensor]:
        return {one.name: plane for one, plane in zip(self.formats[group], self._planes[group])}

    def _settle(self) -> None:
        if self._storage.before_transfer is not None:
            self._storage.before_transfer()


def _assign(plane: torch.Tensor, blocks: Sequence[int], rows: torch.Tensor) -> None:
    if plane.device.type == "cpu":  # numpy copies whole rows at once, torch byte by byte
        plane.numpy()[list(blocks)] = rows.numpy()
    else:
        plane.index_copy_(0, torch.tensor(blocks, dtype=torch.int64, device=plane.device), rows)
