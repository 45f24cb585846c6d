"""The noise is a pure function with known bits, and an element's float never depends on where it stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.sampling import noise

GOLDEN = [
    (0, 0, 0, 0x6627E8D5, 0.50923771, 0.674840),
    (0, 0, 1, 0xE169C58D, 2.1246083, -0.753587),
    (0, 0, 4, 0xF8E4CCA4, 3.5842032, -1.276536),
    (7, 12, 31, 0x24DCB937, 0.15547669, 1.861259),
    (7, 12, 49151, 0x8BF15115, 0.79109293, 0.234340),
    (18446744073709551615, 131071, 151935, 0x42B28A2D, 0.30183074, 1.197889),
    (1234567890123, 8191, 2, 0x52BBE8C3, 0.3903496, 0.940713),
]


def test_philox_known_answers():
    assert noise.philox((0, 0, 0, 0), 0)[:, 0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert noise.philox((ones,) * 4, 2**64 - 1)[:, 0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize(("seed", "position", "token", "bits", "e", "g"), GOLDEN)
def test_golden_values(seed, position, token, bits, e, g):
    found = noise.token_bits(seed, position, token)
    assert found.tolist() == [bits]
    value = noise.gumbel(found)
    assert value.dtype == np.float32
    assert value[0] == pytest.approx(g, abs=1e-6)
    assert np.exp(-float(value[0])) == pytest.approx(e, rel=1e-6)


def test_all_golden_values_at_once():
    seeds, positions, tokens, bits, _, _ = (list(column) for column in zip(*GOLDEN))
    found = noise.token_bits(np.array(seeds, dtype=np.uint64), np.array(positions), np.array(tokens))
    assert found.tolist() == bits


def test_seeds_of_samples():
    assert [noise.sample_seed(7, i) for i in range(3)] == [7, 0x959F0570DA17728E, 0xE84753D5F7B6228B]


def test_accept_uniform():
    assert noise.scalar_bits(7, 12, 0, noise.ACCEPT, cycle=10) == 0x65A9C979
    assert noise.accept_uniform(7, 12, 0, cycle=10) == (0x65A9C979 >> 8) * 2.0**-24


def test_purposes_levels_and_cycles_draw_apart():
    draws = {noise.scalar_bits(7, 12, 0, purpose, cycle=cycle, level=level)
             for purpose in range(5) for cycle in (10, 11) for level in (0, 1)}
    assert len(draws) == 20


@pytest.mark.parametrize("width", [1, 2, 4, 7, 40_003])
@pytest.mark.parametrize("limit", [0, 2**28, 2**32 - 1])
def test_lucky_tokens_are_those_with_few_bits(width, limit):
    bits = noise.token_bits(2**63 + 5, 9, np.arange(width))
    tokens, found = noise.lucky_tokens(2**63 + 5, 9, width, limit)
    assert tokens.tolist() == np.flatnonzero(bits <= limit).tolist()
    assert (found == bits[tokens]).all()


def test_no_tokens_no_bits():
    none = np.empty(0, dtype=np.int64)
    assert len(noise.gumbel(noise.token_bits(np.empty(0, dtype=np.uint64), none, none))) == 0


def test_gumbel_is_finite_monotone_and_inside_its_bounds():
    edges = np.array([0, 1, 2, 2**24 - 1, 2**31, 2**32 - 300, 2**32 - 129, 2**32 - 128, 2**32 - 1], dtype=np.uint32)
    spread = np.sort(np.concatenate((edges, np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32))))
    g = noise.gumbel(spread)
    assert np.isfinite(g).all()
    assert (np.diff(g.astype(np.float64)) <= 4e-6).all(), "more bits, less noise, up to rounding"
    assert noise.GUMBEL_MIN <= g.min() < noise.GUMBEL_MIN + 1e-3
    assert noise.GUMBEL_MAX - 1e-3 < g.max() <= noise.GUMBEL_MAX


def test_gumbel_agrees_with_float64():
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, dtype=np.uint32)
    v = np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # Where v is near 1 its own rounding to float32 is what differs: compare on the rounded v.
    exact = -np.log(-np.log1p(-v.astype(np.float32).astype(np.float64)))
    assert np.abs(noise.gumbel(bits) - exact).max() < 5e-6


def test_uniform_is_exact_and_below_one():
    bits = np.array([0, 255, 256, 2**31, 2**32 - 1], dtype=np.uint32)
    assert noise.uniform(bits).tolist() == [0.0, 0.0, 2.0**-24, 0.5, 1 - 2.0**-24]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["gumbel", "exp"])
def test_an_elements_value_does_not_depend_on_its_place(name, threads):
    """Not on its index, the array's length, its alignment or the number of threads."""
    rng = np.random.default_rng(2)
    if name == "gumbel":
        data = rng.integers(0, 2**32, 257, dtype=np.uint32)
        function = noise.gumbel
    else:
        data = (-60 * rng.random(257)).astype(np.float32)

        def function(x):
            return torch.from_numpy(np.ascontiguousarray(x)).clone().exp_().numpy()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = np.array([function(data[i:i + 1])[0] for i in range(len(data))])
        torch.set_num_threads(threads)
        for offset in range(33):
            assert (function(data[offset:]) == alone[offset:]).all()
            assert (function(data[:offset]) == alone[:offset]).all()
        many = np.tile(data, 500)
        for offset in (0, 1, 5):
            assert (function(many[offset:]) == np.tile(alone, 500)[offset:]).all()
    finally:
        torch.set_num_threads(before)
