"""The device's noise has NOISE's bits, and its floats are bitwise those of the native sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from paceline.kernels import cpu
from paceline.kernels.triton.sampling.noise import gumbel, token_bits
from paceline.sampling import noise

GOLDEN = [
    (0, 0, 0, 0x6627E8D5, 0.674840),
    (0, 0, 1, 0xE169C58D, -0.753587),
    (0, 0, 4, 0xF8E4CCA4, -1.276536),
    (7, 12, 31, 0x24DCB937, 1.861259),
    (7, 12, 49151, 0x8BF15115, 0.234340),
    (18446744073709551615, 131071, 151935, 0x42B28A2D, 1.197889),
    (1234567890123, 8191, 2, 0x52BBE8C3, 0.940713),
]


@triton.jit
def noise_kernel(seed, position, first, bits_out, noise_out, BLOCK: tl.constexpr):
    bits = token_bits(first, tl.load(seed), tl.load(position), BLOCK)
    at = tl.arange(0, BLOCK)
    tl.store(bits_out + at, bits.to(tl.int64))
    tl.store(noise_out + at, gumbel(bits))


@triton.jit
def gumbel_kernel(bits, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, gumbel(tl.load(bits + at).to(tl.uint32)))


def draw(device, seed, position, first, count=256):
    bits = torch.zeros(count, dtype=torch.int64, device=device)
    values = torch.zeros(count, dtype=torch.float32, device=device)
    scalar = [torch.from_numpy(np.array([x], dtype=np.uint64).view(np.int64)).to(device) for x in (seed, position)]
    noise_kernel[(1,)](*scalar, first, bits, values, BLOCK=count, enable_fp_fusion=False)
    return bits.cpu().numpy(), values.cpu().numpy()


@pytest.mark.parametrize(("seed", "position", "token", "bits", "g"), GOLDEN)
def test_golden_values(device, seed, position, token, bits, g):
    first = token // 256 * 256
    found, values = draw(device, seed, position, first)
    assert found[token - first] == bits
    assert values[token - first] == pytest.approx(g, abs=1e-6)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 12), (2**64 - 1, 131071), (1 << 63, 2**32 - 1)])
def test_bits_equal_the_hosts(device, seed, position):
    found, values = draw(device, seed, position, 4096)
    bits = noise.token_bits(seed, position, np.arange(4096, 4096 + 256))
    assert (found == bits).all()
    assert np.abs(values - noise.gumbel(bits)).max() < 5e-6


def test_floats_are_bitwise_those_of_the_native_sampler(device):
    native = cpu.load()
    if native is None or not hasattr(native, "token_noise"):
        pytest.skip("the native library is not built")
    for seed in range(4):
        tokens = np.arange(1024, dtype=np.int64)
        bits, expected = np.zeros(1024, dtype=np.uint32), np.zeros(1024, dtype=np.float32)
        native.token_noise(seed, 99, tokens, bits, expected)
        _, values = draw(device, seed, 99, 0, 1024)
        assert (values == expected).all()


def test_extreme_bits_stay_inside_the_bounds(device):
    edges = [0, 1, 2, 2**24 - 1, 2**31, 2**32 - 300, 2**32 - 129, 2**32 - 128, 2**32 - 2, 2**32 - 1]
    bits = torch.tensor(edges + [2**31] * 6, device=device)
    out = torch.empty(16, dtype=torch.float32, device=device)
    gumbel_kernel[(1,)](bits, out, BLOCK=16, enable_fp_fusion=False)
    g = out.cpu().numpy()[:len(edges)]
    assert (np.diff(g) <= 0).all() and g[-1] >= noise.GUMBEL_MIN and g[0] <= noise.GUMBEL_MAX
    assert np.abs(g - noise.gumbel(np.array(edges, dtype=np.uint32))).max() < 5e-6
