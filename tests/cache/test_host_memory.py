"""Blocks that go to host memory and back: preempted sequences and cold prefix blocks; limits, leaks, contents."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.cache.host import HostLimits
from paceline.cache.host_storage import HostStorage
from paceline.cache.manager import CacheManager
from paceline.cache.storage import KVStorage, together
from paceline.cache.transfers import BlockCopy, Route
from paceline.kernels.groups import CacheGroup

CPU = torch.device("cpu")
GROUPS = (CacheGroup("full", (0, 2), kv_heads=2, head_dim=16),
          CacheGroup("latent", (1,), kv_heads=1, head_dim=16, latent=12))
TEXT = list(range(100, 140))


def manager(blocks: int = 11, swap: int = 0, cold: int = 0, **more: object) -> CacheManager:
    group = CacheGroup("full", (0,), 1, 1)
    return CacheManager([group], [blocks], 4, 4, 10, host=HostLimits(swap, cold, **more))  # type: ignore[arg-type]


def run(cache: CacheManager, tokens: list[int]) -> None:
    """A sequence comes, is computed and goes; its whole blocks stay in the prefix cache."""
    allocation = cache.open(tokens)
    assert allocation is not None
    cache.fetch(allocation)
    assert cache.reserve(allocation, allocation.cached, len(tokens)) is not None
    cache.commit(allocation, tokens, len(tokens))
    cache.close(allocation)


# ------------------------------------------------------------------ contents

def test_what_of_a_cache_lies_in_the_processs_memory_is_told_once() -> None:
    storage = KVStorage(GROUPS, [6] * len(GROUPS), 4, torch.float32, CPU)
    assert sum(tensor.numel() * tensor.element_size() for tensor in storage.on_host) == storage.bytes
    host = HostStorage(storage.planes, 4, 4, CPU)
    storage.hosts = {Route.SWAP_OUT: host, Route.SWAP_IN: host}
    assert sum(tensor.numel() * tensor.element_size() for tensor in storage.on_host) == storage.bytes + host.bytes


@pytest.mark.parametrize("staging", [None, 1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_all_planes_of_a_block_come_back_as_they_went(dtype: torch.dtype, staging: int | None,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Plane by plane as on a CPU, and put together in few bytes or many as on a card."""
    if staging is not None:
        monkeypatch.setattr(HostStorage, "_copy_here", HostStorage._copy_staged)
        monkeypatch.setattr("paceline.cache.host_storage.STAGING", staging)
    groups = GROUPS if dtype.itemsize > 1 else GROUPS[:1]
    storage = KVStorage(groups, [6] * len(groups), 4, dtype, CPU)
    host = HostStorage(storage.planes, 4, 4, CPU)
    storage.hosts = {Route.SWAP_OUT: host, Route.SWAP_IN: host}
    for planes in storage.planes:
        for plane in planes:
            plane.view(torch.uint8).copy_(torch.randint(1, 100, plane.view(torch.uint8).shape))
    before = [[plane.clone() for plane in planes] for planes in storage.planes]
    last = len(groups) - 1
    storage.apply([], [BlockCopy(last, 2, 1, Route.SWAP_OUT), BlockCopy(last, 4, 3, Route.SWAP_OUT)])
    for plane in storage.planes[last]:
        plane[8:20].zero_()
    storage.apply([], [BlockCopy(last, 3, 5, Route.SWAP_IN), BlockCopy(last, 1, 2, Route.SWAP_IN)])
    for plane, old in zip(storage.planes[last], before[last]):
        assert torch.equal(plane[20:24].view(torch.uint8), old[16:20].view(torch.uint8))
        assert torch.equal(plane[:12].view(torch.uint8), old[:12].view(torch.uint8))
        assert not plane[12:20].view(torch.uint8).any()
    assert host.block_bytes == storage.block_bytes and host.bytes == 4 * sum(storage.block_bytes)


def test_measuring_leaves_the_cache_as_it_was() -> None:
    storage = KVStorage(GROUPS, [9, 9], 4, torch.float32, CPU)
    for planes in storage.planes:
        for plane in planes:
            plane[4:].copy_(torch.randn(plane[4:].shape))
    before = [plane.clone() for planes in storage.planes for plane in planes]
    rates = HostStorage(storage.planes, 4, 5, CPU).measure()
    assert rates.out > 0 and rates.back > 0
    assert all(torch.equal(old, new) for old, new in zip(before, (p for planes in storage.planes for p in planes)))


class Runtime:
    """CUDA's, of which a call that fails is the last error until somebody asks for it."""

    def __init__(self, register: int) -> None:
        self.register = register
        self.last = 0
        self.registered: list[int] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.last = self.register
        self.registered.append(pointer)
        return self.register

    def cudaHostUnregister(self, pointer: int) -> int:
        self.unregistered.append(pointer)
        return 0

    def launch(self) -> None:
        error, self.last = self.last, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


class LaterRuntime(Runtime):
    def cudaGetLastError(self) -> int:
        error, self.last = self.last, 0
        return error


@pytest.mark.parametrize("kind", [Runtime, LaterRuntime])
def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_no_error_is_left(
        kind: type[Runtime], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime = kind(register=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", lambda *size, device: runtime.launch())
    storage = KVStorage(GROUPS, [6, 6], 4, torch.float32, CPU)
    host = HostStorage(storage.planes, 4, 4, torch.device("cuda"))
    runtime.launch()
    assert not host.pinned and host.bytes == 4 * sum(storage.block_bytes)
    assert len(runtime.registered) == 1, "who is refused once does not ask again"
    assert [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()] == [
        f"{4 * storage.block_bytes[0]} bytes of host memory cannot be pinned (CUDA error 2): copies there and back "
        "take longer"]
    del host
    assert not runtime.unregistered


def test_pinned_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(register=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    storage = KVStorage(GROUPS, [6, 6], 4, torch.float32, CPU)
    host = HostStorage(storage.planes, 4, 4, torch.device("cuda"))
    assert host.pinned and len(runtime.registered) == 2 and not runtime.unregistered
    del host
    assert sorted(runtime.unregistered) == sorted(runtime.registered)


@pytest.mark.parametrize("seed", range(30))
def test_copies_taken_together_do_what_they_do_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    routes = (Route.WITHIN, Route.WITHIN, Route.SWAP_OUT, Route.SWAP_IN)
    copies = [BlockCopy(chance.randrange(2), chance.randrange(6), chance.randrange(6), chance.choice(routes))
              for _ in range(chance.randrange(1, 25))]

    def carried_out(parts: list[tuple[int, Route, list[tuple[int, int]]]]) -> dict[tuple[str, int, int], str]:
        memory = {(place, g, b): f"{place}{g}{b}" for place in ("device", "host") for g in range(2) for b in range(6)}
        for group, route, pairs in parts:
            origin = "host" if route is Route.SWAP_IN else "device"
            goal = "host" if route is Route.SWAP_OUT else "device"
            read = [memory[origin, group, source] for source, _ in pairs]
            assert len({target for _, target in pairs}) == len(pairs)
            for (_, target), content in zip(pairs, read):
                memory[goal, group, target] = content
        return memory

    one_by_one = [(copy.group, copy.route, [(copy.source, copy.target)]) for copy in copies]
    assert carried_out(list(together(copies))) == carried_out(one_by_one)


# ------------------------------------------------------------------ cold prefix blocks

def test_a_block_that_had_to_make_room_comes_back_on_a_hit() -> None:
    cache = manager(cold=20)
    run(cache, TEXT)
    run(cache, [7] * 40)
    assert cache.cold.used == 10
    allocation = cache.open(TEXT)
    assert allocation is not None and allocation.cached == 36 and allocation.miss is None
    assert cache.needed(allocation, 0, 40) == 10, "nine blocks to fetch and one more"
    copies = cache.fetch(allocation)
    fetched = [copy for copy in copies if copy.route is Route.FETCH]
    assert [copy.target for copy in fetched] == allocation.blocks[0] and len(set(allocation.blocks[0])) == 9
    assert all(copy.route is Route.OFFLOAD for copy in copies[:len(copies) - 9]), "room is made before it is used"
    cache.check([allocation])
    cache.close(allocation)
    cache.check([])


def test_the_least_recently_used_cold_blocks_are_given_up_and_the_limit_is_kept() -> None:
    cache = manager(cold=12)
    for token in (1, 2, 3):
        run(cache, [token] * 40)
        assert cache.cold.used <= 12
        cache.check([])
    cached = []
    for token in (1, 2):
        allocation = cache.open([token] * 40)
        assert allocation is not None
        cached.append(allocation.cached)
        cache.abandon(allocation, [token] * 40)
        cache.check([])
    assert cached == [8, 36], "of the oldest text the beginning is left"


def test_a_block_that_came_back_makes_room_again_without_a_copy() -> None:
    cache = manager(cold=40)
    run(cache, TEXT)
    run(cache, [7] * 40)
    run(cache, TEXT)
    out = cache.cold.blocks_out
    run(cache, [8] * 40)
    assert cache.cold.blocks_out == out, "what was evicted is on the host already"


def test_a_sequence_that_does_not_fit_lets_go_of_what_it_was_about_to_fetch() -> None:
    cache = manager(cold=20)
    run(cache, TEXT)
    run(cache, [7] * 40)
    allocation = cache.open(TEXT)
    assert allocation is not None and allocation.absent
    cache.abandon(allocation, TEXT)
    cache.check([])
    assert (cache.hits, cache.queries) == (0, 80)


def test_without_host_memory_blocks_are_forgotten_and_it_is_asked_for_once() -> None:
    asked = []
    cache = manager(cold=20, allocate_cold=lambda: asked.append(1) is not None)
    for text in (TEXT, [7] * 40, TEXT):
        run(cache, text)
        cache.check([])
    assert asked == [1] and cache.cold.used == cache.cold.blocks_out == cache.hits == 0


def test_what_is_forgotten_does_not_come_back_from_the_host() -> None:
    cache = manager(cold=20)
    run(cache, TEXT)
    run(cache, [7] * 40)
    assert cache.cold.used == 10
    cache.forget()
    assert cache.cold.used == 0
    cache.check([])
    allocation = cache.open(TEXT)
    assert allocation is not None and allocation.cached == 0 and not allocation.absent
    cache.close(allocation)
    cache.check([])


# ------------------------------------------------------------------ swapped sequences

def test_a_swapped_sequence_gets_everything_back_that_the_prefix_cache_has_lost() -> None:
    cache = manager(swap=10)
    allocation = cache.open(TEXT)
    assert allocation is not None and cache.reserve(allocation, 0, 38) == []
    cache.commit(allocation, TEXT, 38)
    held = list(allocation.blocks[0])
    out = cache.swap_out(allocation, 38)
    assert out is not None
    swapped, copies = out
    assert [copy.source for copy in copies] == held and {copy.route for copy in copies} == {Route.SWAP_OUT}
    cache.close(allocation)
    cache.check([], [swapped])
    run(cache, [7] * 12)  # takes the block that was never shared, and the last two that were
    again = cache.open(TEXT)
    assert again is not None and again.cached == 28
    assert cache.fetch(again) == []
    length, copies = cache.swap_in(again, swapped)
    assert length == 38 and [copy.route for copy in copies] == [Route.SWAP_IN] * 3
    assert [copy.target for copy in copies] == again.blocks[0][7:] and cache.swap.used == 0
    cache.commit(again, TEXT, 38)
    cache.check([again])


def test_the_swap_space_is_bounded_and_a_dropped_sequence_frees_its_part() -> None:
    cache = manager(swap=5)
    allocation = cache.open(TEXT)
    assert allocation is not None and cache.reserve(allocation, 0, 24) == []
    assert cache.swap_out(allocation, 24) is None, "six blocks, and there is room for five"
    out = cache.swap_out(allocation, 20)
    assert out is not None and cache.swap_out(allocation, 1) is None
    cache.check([allocation], [out[0]])
    cache.swap.drop(out[0])
    cache.check([allocation])
    assert cache.usage().swap_used == 0 and cache.usage().swap_total == 5
