"""The tensors that block tables point into, and the copies and moves the bookkeeping asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.cache.host_storage import HostStorage
from paceline.cache.transfers import BlockCopy, Route, SlotMove
from paceline.errors import ConfigError
from paceline.kernels.groups import CacheGroup
from paceline.kernels.planes import Plane
from paceline.kernels.reference.quantised import LARGEST, as_bytes

SCALE = torch.float32


def bytes_per_token(groups: Sequence[CacheGroup], dtype: torch.dtype, extra: Sequence[Plane] = ()) -> int:
    """What a token takes in a KVStorage of these groups, scales and extra planes included."""
    scale = SCALE.itemsize if dtype in LARGEST else 0
    return (sum(group.bytes_per_token(dtype.itemsize, scale) for group in groups)
            + sum(plane.bytes_per_token for plane in extra))


class Mirror(Protocol):
    """Who has the same done to other shares of a cache."""

    def apply(self, moves: Sequence[SlotMove], copies: Sequence[BlockCopy]) -> None: ...

    def add_host(self, routes: Sequence[Route], host: HostStorage) -> None: ...


class KVStorage:
    """Keys and values of every layer: [slots, kv_heads, head_dim], slot = block * block_size + offset.

    8-bit caches hold a float32 scale a token and head beside them, [slots, kv_heads], in key_scales and value_scales;
    for other dtypes those are empty. Zeroed at start and never holding anything but finite values of finished
    forwards; block 0 stays zero.

    keys, values and their scales are how layers see the cache: the values of a latent group are views of its keys, and
    a layer that reads another one's cache sees that one's tensors. What there is to copy is in `planes`.

    `extra` holds what somebody else keeps of every token, by name (kernels.planes.Plane), zeroed as the rest.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int,
                 dtype: torch.dtype, device: torch.device, extra: Sequence[Plane] = ()) -> None:
        """`num_blocks` counts the null block."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.key_scales: dict[int, torch.Tensor] = {}
        self.value_scales: dict[int, torch.Tensor] = {}
        self.extra: dict[str, torch.Tensor] = {}
        self.planes: list[list[torch.Tensor]] = []
        """Of each group the tensors that hold its tokens, each memory once, contiguous, slots first."""
        self.before_transfer: Callable[[], None] | None = None
        """Called before anything is moved or copied: who still has something to write to `extra` does it then."""
        self.hosts: dict[Route, HostStorage] = {}
        """What copies on these routes write to or read."""
        self.mirror: Mirror | None = None
        """Where others hold the rest of every token (tensor parallel): told of all that is done here."""
        for group, blocks in zip(self.groups, num_blocks, strict=True):
            self.planes.append([plane for layer in group.layers
                                for plane in self._allocate(group, layer, blocks * block_size)])
            for layer, owner in group.readers:
                for seen in (self.keys, self.values, self.key_scales, self.value_scales):
                    if owner in seen:
                        seen[layer] = seen[owner]
        for plane in extra:
            if plane.name in self.extra:
                raise ValueError(f"two planes of a cache are called {plane.name}")
            tensor = _zeros((num_blocks[plane.group] * block_size, *plane.shape), plane.dtype, device)
            self.extra[plane.name] = tensor
            self.planes[plane.group].append(tensor)

    def _allocate(self, group: CacheGroup, layer: int, slots: int) -> list[torch.Tensor]:
        shape = (slots, group.kv_heads, group.head_dim)
        if group.latent is not None:
            if self.dtype in LARGEST:
                raise ConfigError(f"A latent cache (MLA) holds 16- or 32-bit floats, not {self.dtype}: use "
                                  "kv_dtype='auto', 'float16' or 'bfloat16'.")
            keys = self.keys[layer] = _zeros(shape, self.dtype, self.device)
            self.values[layer] = keys[..., :group.latent]
            return [keys]
        planes = []
        for codes, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            codes[layer] = _zeros(shape, self.dtype, self.device)
            planes.append(codes[layer])
            if self.dtype in LARGEST:
                scales[layer] = _zeros(shape[:2], SCALE, self.device)
                planes.append(scales[layer])
        return planes

    @property
    def bytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for planes in self.planes for plane in planes)

    @property
    def on_host(self) -> list[torch.Tensor]:
        """All that lies in the process's memory: its own where the device is the processor, and what is sent there."""
        own = [plane for planes in self.planes for plane in planes if plane.device.type == "cpu"]
        return own + [tensor for host in set(self.hosts.values()) for tensor in host.tensors]

    @property
    def block_bytes(self) -> list[int]:
        """What a block of each group takes."""
        return [sum(plane[:self.block_size].numel() * plane.element_size() for plane in planes)
                for planes in self.planes]

    def apply(self, moves: Sequence[SlotMove], copies: Sequence[BlockCopy]) -> None:
        """Moves first, then copies in their order: a block may be shared right after a path was compacted into it."""
        if self.before_transfer is not None and (moves or copies):
            self.before_transfer()
        if self.mirror is not None and (moves or copies):
            self.mirror.apply(moves, copies)
        for index, planes in enumerate(self.planes):
            slots = [(move.source, move.target) for move in moves if move.group == index]
            self._transfer(planes, slots)
        for group, route, blocks in together(copies):
            if route is Route.WITHIN:
                size = self.block_size
                self._transfer(self.planes[group], [(s * size + i, t * size + i) for s, t in blocks
                                                    for i in range(size)])
            else:
                self.hosts[route].copy(group, blocks, route)

    def add_host(self, routes: Sequence[Route], host: HostStorage) -> None:
        """Copies on these routes are possible from now on."""
        if self.mirror is not None:
            self.mirror.add_host(routes, host)
        self.hosts |= dict.fromkeys(routes, host)

    def _transfer(self, planes: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        for plane in planes:
            # Gather into a fresh tensor, then scatter: sources and targets overlap.
            values = as_bytes(plane)
            values[target] = values[source]


def together(copies: Sequence[BlockCopy]) -> Iterator[tuple[int, Route, list[tuple[int, int]]]]:
    """Copies as (group, route, pairs) such that all of one entry may be read before any is written, and entries one
    after another do what the copies would do one by one. No target is twice in an entry."""
    begin = 0
    while begin < len(copies):
        route, written = copies[begin].route, set[tuple[int, int]]()
        groups: dict[int, dict[int, int]] = {}
        for copy in copies[begin:]:
            if copy.route is not route or (route is Route.WITHIN and (copy.group, copy.source) in written):
                break
            written.add((copy.group, copy.target))
            groups.setdefault(copy.group, {})[copy.target] = copy.source
            begin += 1
        for group, sources in groups.items():
            yield group, route, [(source, target) for target, source in sources.items()]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every byte; calloc's pages are zero and cost nothing until a block is used.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
