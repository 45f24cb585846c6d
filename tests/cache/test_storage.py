"""KVStorage: what moves and copies do to the tensors, scales of 8-bit caches included, and what it all takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cache.host_storage import HostStorage
from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.cache.transfers import BlockCopy, Route, SlotMove
from paceline.errors import ConfigError
from paceline.kernels.groups import CacheGroup
from paceline.kernels.planes import Plane

GROUPS = (CacheGroup("full", (0, 2), kv_heads=2, head_dim=16),
          CacheGroup("window", (1,), kv_heads=1, head_dim=16, window=8))
CPU = torch.device("cpu")


def filled(dtype: torch.dtype) -> tuple[KVStorage, list[dict[int, torch.Tensor]]]:
    """A storage whose every slot tells its number, and its planes."""
    storage = KVStorage(GROUPS, [5, 4], 4, dtype, CPU)
    planes = [plane for plane in (storage.keys, storage.values, storage.key_scales, storage.value_scales) if plane]
    for number, plane in enumerate(planes):
        for layer, tensor in plane.items():
            numbers = torch.arange(tensor.shape[0]) + number + 10 * layer
            tensor.copy_(numbers.view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape))
    return storage, planes


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_an_accepted_path_is_moved_in_every_plane_of_its_group(dtype: torch.dtype) -> None:
    storage, planes = filled(dtype)
    assert len(planes) == (4 if dtype.itemsize == 1 else 2)
    before = [{layer: tensor.clone() for layer, tensor in plane.items()} for plane in planes]
    storage.apply([SlotMove(0, 7, 6), SlotMove(0, 9, 7), SlotMove(0, 11, 8)], [])  # 7 is read before it is written
    for old, plane in zip(before, planes):
        for layer in GROUPS[0].layers:
            expected = old[layer].clone()
            expected[6], expected[7], expected[8] = old[layer][7], old[layer][9], old[layer][11]
            assert torch.equal(plane[layer], expected)
        assert torch.equal(plane[1], old[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_blocks_are_copied_after_the_moves(dtype: torch.dtype) -> None:
    storage, planes = filled(dtype)
    before = [{layer: tensor.clone() for layer, tensor in plane.items()} for plane in planes]
    storage.apply([SlotMove(1, 9, 4)], [BlockCopy(1, 1, 3)])
    for old, plane in zip(before, planes):
        expected = old[1].clone()
        expected[4] = old[1][9]
        expected[12:16] = expected[4:8]
        assert torch.equal(plane[1], expected)
        assert torch.equal(plane[0], old[0])


@pytest.mark.parametrize(("dtype", "vector"), [(torch.float32, 64), (torch.float16, 32), (torch.int8, 16 + 4),
                                                (torch.float8_e4m3fn, 16 + 4)])
def test_bytes_count_the_scales(dtype: torch.dtype, vector: int) -> None:
    storage = KVStorage(GROUPS, [5, 4], 4, dtype, CPU)
    assert bytes_per_token(GROUPS, dtype) == 2 * (2 * 2 + 1) * vector
    assert storage.bytes == 2 * vector * (2 * 2 * 5 * 4 + 1 * 4 * 4)


LATENT = CacheGroup("latent", (0, 1), kv_heads=1, head_dim=24, latent=16)
SHARED = CacheGroup("shared", (2, 3), kv_heads=2, head_dim=8, readers=((4, 3), (5, 2)))


def test_the_values_of_a_latent_group_are_the_beginning_of_its_keys() -> None:
    """d_c + d_r elements a token and layer, and not one more."""
    storage = KVStorage([LATENT], [5], 4, torch.float32, CPU)
    assert LATENT.bytes_per_token(4) == 2 * 24 * 4
    assert storage.bytes == bytes_per_token([LATENT], torch.float32) * 5 * 4
    storage.keys[1][7] = torch.arange(24.0)
    assert torch.equal(storage.values[1][7, 0], torch.arange(16.0))
    storage.apply([SlotMove(0, 7, 6)], [BlockCopy(0, 1, 3)])
    assert torch.equal(storage.keys[1][14, 0], torch.arange(24.0))
    assert torch.equal(storage.values[1][6, 0], torch.arange(16.0)) and not storage.keys[0].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_latent_cache_in_8_bits_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"latent.*float16"):
        KVStorage([LATENT], [5], 4, dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_layers_that_read_anothers_cache_take_no_room(dtype: torch.dtype) -> None:
    storage = KVStorage([SHARED], [4], 4, dtype, CPU)
    vector = 8 * dtype.itemsize + (4 if dtype == torch.int8 else 0)
    assert SHARED.bytes_per_token(dtype.itemsize, 4 if dtype == torch.int8 else 0) == 2 * 2 * 2 * vector
    for plane in (storage.keys, storage.values):
        assert plane[4] is plane[3] and plane[5] is plane[2]
    assert storage.key_scales.get(4) is storage.key_scales.get(3)
    assert len({plane.data_ptr() for plane in storage.planes[0]}) == len(storage.planes[0])
    assert sum(plane.numel() * plane.element_size() for plane in storage.planes[0]) == 2 * 2 * 2 * vector * 4 * 4


EXTRA = (Plane("head.keys", (2, 3, 4), torch.float16), Plane("head.scales", (5,), torch.float32),
         Plane("head.codes", (3, 8), torch.int8, group=1))


def test_extra_planes_are_counted_and_lie_beside_those_of_their_group() -> None:
    storage = KVStorage(GROUPS, [5, 4], 4, torch.float32, CPU, EXTRA)
    plain = KVStorage(GROUPS, [5, 4], 4, torch.float32, CPU)
    assert [plane.bytes_per_token for plane in EXTRA] == [48, 20, 24]
    assert bytes_per_token(GROUPS, torch.float32, EXTRA) == bytes_per_token(GROUPS, torch.float32) + 92
    assert storage.bytes == plain.bytes + 5 * 4 * 68 + 4 * 4 * 24
    assert [size - own for size, own in zip(storage.block_bytes, plain.block_bytes)] == [4 * 68, 4 * 24]
    assert storage.extra["head.keys"].shape == (20, 2, 3, 4) and storage.extra["head.codes"].dtype == torch.int8
    assert not any(plane.any() for plane in storage.extra.values())


def test_extra_planes_that_could_not_be_told_apart_or_moved_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two planes.*head\.keys"):
        KVStorage(GROUPS, [5, 4], 4, torch.float32, CPU, [EXTRA[0], EXTRA[0]])
    with pytest.raises(ValueError, match="32-bit words"):
        Plane("odd", (3,), torch.float16)


STEPS = st.lists(st.one_of(
    st.tuples(st.just("move"), st.integers(0, 1), st.lists(st.integers(4, 15), min_size=2, max_size=8, unique=True)),
    st.tuples(st.sampled_from(list(Route)), st.integers(0, 1),
              st.lists(st.integers(1, 3), min_size=2, max_size=2, unique=True))), max_size=12)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_becomes_of_a_token_becomes_of_its_extra_planes(steps: list[Any]) -> None:
    """Compaction, copy-on-write, swaps and offloads in any order: an entry is found where the token's keys are."""
    storage = KVStorage(GROUPS, [5, 4], 4, torch.float32, CPU, EXTRA)
    swapped, cold = (HostStorage(storage.planes, 4, 5, CPU) for _ in range(2))
    storage.hosts = {Route.SWAP_OUT: swapped, Route.SWAP_IN: swapped, Route.OFFLOAD: cold, Route.FETCH: cold}
    for planes in storage.planes:
        for plane in planes:
            plane.copy_(torch.arange(plane.shape[0]).view(-1, *[1] * (plane.dim() - 1)).expand(plane.shape))
    for host in (swapped, cold):  # what was never written there is zero in all planes
        for memory in host._memory:
            memory.zero_()
    for kind, group, places in steps:
        if kind == "move":
            half = len(places) // 2
            storage.apply([SlotMove(group, source, target) for source, target in zip(places[:half], places[half:])], [])
        else:
            storage.apply([], [BlockCopy(group, places[0], places[1], kind)])
    for planes in storage.planes:
        first = [float(value) for value in planes[0].flatten(1)[:, 0]]
        for plane in planes:
            assert [float(value) for value in plane.flatten(1)[:, 0]] == first
            assert torch.equal(plane, plane.flatten(1)[:, :1].view(-1, *[1] * (plane.dim() - 1)).expand(plane.shape))
