"""KVStorage: what moves and copies do to the tensors, scales of 8-bit caches included, and what it all takes."""

from __future__ import annotations

import pytest
import torch

from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.cache.transfers import BlockCopy, SlotMove
from paceline.errors import ConfigError
from paceline.kernels.groups import CacheGroup

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
