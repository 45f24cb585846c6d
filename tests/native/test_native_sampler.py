"""The native sampler draws what the numpy pipeline draws: the noise's bits, the same supports, the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import SamplingParams
from paceline.sampling import NO_TOKEN, Pipeline, Processed, SampleRow, SampleState
from paceline.sampling.native import load
from paceline.sampling.noise import gumbel, token_bits

native = load()
pytestmark = pytest.mark.skipif(native is None, reason="the native library is not built")

GOLDEN = [
    (0, 0, 0, 0x6627E8D5, 0.674840),
    (0, 0, 1, 0xE169C58D, -0.753587),
    (0, 0, 4, 0xF8E4CCA4, -1.276536),
    (7, 12, 31, 0x24DCB937, 1.861259),
    (7, 12, 49151, 0x8BF15115, 0.234340),
    (18446744073709551615, 131071, 151935, 0x42B28A2D, 1.197889),
    (1234567890123, 8191, 2, 0x52BBE8C3, 0.940713),
]


# ---------------------------------------------------------------- noise


def noise_of(seed: int, position: int, tokens: np.ndarray, grouped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    bits, noise = np.empty(len(tokens), dtype=np.uint32), np.empty(len(tokens), dtype=np.float32)
    native.token_noise(seed, position, tokens, bits, noise, grouped)
    return bits, noise


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("seed", "position", "token", "bits", "g"), GOLDEN)
def test_golden_values(seed, position, token, bits, g, grouped):
    found, noise = noise_of(seed, position, np.array([token]), grouped)
    assert found[0] == bits
    assert noise[0] == pytest.approx(g, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 300_000), st.booleans())
def test_bits_are_the_same_and_noise_is_within_rounding(seed, position, start, grouped):
    tokens = np.arange(start, start + 257)
    bits, noise = noise_of(seed, position, tokens, grouped)
    assert (bits == token_bits(seed, position, tokens)).all()
    np.testing.assert_allclose(noise, gumbel(bits), rtol=5e-7, atol=5e-7)


def test_noise_is_rounded_from_exact_logarithms():
    """v rounded to float32, E = -log(1 - v) to float32, g = -log E to float32: nothing is lost on the way."""
    tokens = np.arange(100_000)
    bits, noise = noise_of(3, 1, tokens)
    v = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    e = (-np.log1p(-v.astype(np.float64))).astype(np.float32)
    exact = (-np.log(e.astype(np.float64))).astype(np.float32)
    assert (noise == exact).all()


# ---------------------------------------------------------------- against numpy


def state_of(width: int, seed: int = 1, **params) -> SampleState:
    return SampleState(SamplingParams(max_tokens=None, **params), [1], seed, width)


def both(logits: torch.Tensor, states: list[SampleState], position: int = 5) -> tuple[Processed, Processed]:
    """The call's distributions by numpy and natively; tokens are compared on the way."""
    rows = [SampleRow(state, position + i) for i, state in enumerate(states)]
    width = logits.shape[1]
    numpys, natives = Pipeline(width), Pipeline(width, native)
    one, two = numpys.process(logits, rows), natives.process(logits, rows)
    assert one.errors.keys() == two.errors.keys() and one.stopped == two.stopped
    np.testing.assert_array_equal(one.top, two.top)
    np.testing.assert_array_equal(one.best, two.best)
    for i, (a, b) in enumerate(zip(numpys.choose(one), natives.choose(two))):
        if i in one.errors:
            assert a == b == NO_TOKEN
            continue
        check_support(one, two, i)
        if a != b:
            assert_tied(one, i, a, b)
    return one, two


def check_support(one: Processed, two: Processed, row: int) -> None:
    """The same tokens, scores and order; but where the last token's mass is the target to the last bits, it may be
    in or out."""
    (tokens, scores), (others, theirs) = one.support(row), two.support(row)
    shared = min(len(tokens), len(others))
    np.testing.assert_array_equal(tokens[:shared], others[:shared])
    np.testing.assert_array_equal(scores[:shared].view(np.uint32), theirs[:shared].view(np.uint32))
    if len(tokens) != len(others):
        params = one.rows[row].state.params
        assert params.top_p < 1.0
        assert abs(len(tokens) - len(others)) * math.exp(float(scores[shared - 1]) - float(scores[0])) < 1e-6 or \
            abs(boundary_gap(one, row, shared)) < 1e-6


def boundary_gap(processed: Processed, row: int, size: int) -> float:
    """By how much the mass of the `size` best misses what top-p asks for, as a share of the whole."""
    state = processed.rows[row].state
    scores = np.sort(processed.logits_of(row).numpy().astype(np.float64) / float(processed.temperature[row]))[::-1]
    weights = np.exp(scores[:state.top_k] - scores[0])
    return float(weights[:size].sum() / weights.sum()) - state.params.top_p


def assert_tied(processed: Processed, row: int, a: int, b: int) -> None:
    tokens, scores = processed.support(row)
    at = [int(np.flatnonzero(tokens == token)[0]) for token in (a, b)]
    noise = gumbel(token_bits(processed.seeds[row], processed.rows[row].position, [a, b]))
    reached = scores[at].astype(np.float64) + noise
    assert abs(reached[0] - reached[1]) < 4e-6 * max(1.0, abs(reached[0])), "another token, and no tie"


def maybe(strategy, default):
    return st.one_of(st.just(default), strategy)


@st.composite
def controls(draw) -> dict:
    return {"temperature": draw(st.sampled_from([0.0, 1e-9, 1e-3, 0.3, 0.8, 1.0, 2.5, 50.0, 1e6, 1e39])),
            "top_k": draw(maybe(st.sampled_from([1, 2, 5, 40, 300, 4000]), 0)),
            "top_p": draw(maybe(st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999]), 1.0)),
            "min_p": draw(maybe(st.sampled_from([1e-9, 0.02, 0.5, 1.0]), 0.0))}


SHAPES = {
    "peaked": lambda x, rng: np.where(rng.random(x.shape) < 0.01, x * 6 + 8, x * 2.5),
    "flat": lambda x, rng: x * 0.01,
    "wide": lambda x, rng: x * 1e4,
    "huge": lambda x, rng: x * 1e37,
    "tiny": lambda x, rng: x * 1e-40,
    "ties": lambda x, rng: np.round(x * 2) / 2,
    "all equal": lambda x, rng: x * 0 - 3.0,
    "zeros of both signs": lambda x, rng: np.where(x > 0, 0.0, -0.0),
    "mostly -inf": lambda x, rng: np.where(rng.random(x.shape) < 0.9, -np.inf, x),
    "some inf": lambda x, rng: np.where(rng.random(x.shape) < 0.05, np.inf, x),
    "all -inf": lambda x, rng: np.full(x.shape, -np.inf),
    "some NaN": lambda x, rng: np.where(rng.random(x.shape) < 0.5, np.nan, x),
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(controls(), st.sampled_from(sorted(SHAPES)), st.integers(0, 2**64 - 1)), min_size=1,
                max_size=4),
       st.one_of(st.integers(1, 70), st.integers(1, 5000)), st.integers(0, 2**31), st.integers(1, 2**20))
def test_supports_and_tokens_are_numpys(asked, width, luck, position):
    rng = np.random.default_rng(luck)
    logits = np.stack([SHAPES[shape](rng.standard_normal(width), rng) for _, shape, _ in asked]).astype(np.float32)
    states = [state_of(width, seed, **params) for params, _, seed in asked]
    both(torch.from_numpy(logits), states, position)


@pytest.mark.parametrize("params", [{"min_p": 1e-9}, {"top_p": 1e-9}, {"top_k": 5, "top_p": 0.5}, {"top_k": 1}])
def test_scores_that_all_end_at_the_lowest_float(params):
    """Logits so low and a temperature so small that every score is the lowest float: all of them are equal."""
    logits = torch.tensor([[-1.4e37, -1e36, -3e38], [-1e38, -2e38, -np.inf]])
    both(logits, [state_of(3, seed, temperature=1e-9, **params) for seed in (1, 2)], 7)


KINDS = [
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.7}, {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 40}, {"top_p": 0.9, "top_k": 1000}, {"min_p": 0.05},
    {"top_p": 0.99, "min_p": 0.001}, {"temperature": 3.0, "top_p": 0.999}, {"top_k": 30_000, "temperature": 1.2},
    {"min_p": 1e-7, "temperature": 2.0},
]


@pytest.mark.parametrize("shape", ["peaked", "flat", "ties", "wide"])
def test_a_vocabulary_of_49152(shape):
    rng = np.random.default_rng(4)
    logits = SHAPES[shape](rng.standard_normal((len(KINDS), 49_152)), rng).astype(np.float32)
    both(torch.from_numpy(logits), [state_of(49_152, 100 + i, **kind) for i, kind in enumerate(KINDS)])


def test_outsiders_that_luck_alone_lifts_win():
    """Rows with one token far above a plain of equals: the plain wins often, and only its lucky tokens do."""
    width, far = 20_011, 0
    logits = torch.zeros(40, width)
    logits[:, 17] = torch.linspace(6.0, 11.0, 40)
    states = [state_of(width, 900 + i) for i in range(40)]
    rows = [SampleRow(state, 5) for state in states]
    chosen = Pipeline(width, native).sample(logits, rows)
    for i, token in enumerate(chosen):
        everything = logits[i].numpy() + gumbel(token_bits(900 + i, 5, np.arange(width)))
        assert token == int(everything.argmax())
        far += token != 17
    assert 5 < far < 40, "otherwise this proves nothing"


def test_a_row_alone_is_the_row_in_any_company():
    rng = np.random.default_rng(9)
    width = 4099
    logits = torch.from_numpy(SHAPES["peaked"](rng.standard_normal((33, width)), rng).astype(np.float32))
    rows = [SampleRow(state_of(width, i, **KINDS[i % len(KINDS)]), i) for i in range(33)]
    together = Pipeline(width, native)
    processed = together.process(logits, rows)
    chosen = together.choose(processed)
    for i in range(33):
        pipeline = Pipeline(width, native)
        alone = pipeline.process(logits[i:i + 1], rows[i:i + 1])
        assert pipeline.choose(alone) == [chosen[i]]
        assert alone.top[0] == processed.top[i]
        for a, b in zip(alone.support(0), processed.support(i)):
            np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- the boundary


def table(count: int, **changes):
    values = {"kind": np.full(count, 2), "temperature": np.ones(count, dtype=np.float32), "top_k": np.full(count, 9),
              "top_p": np.ones(count), "log_min_p": np.full(count, -np.inf), "seed": np.zeros(count, dtype=np.uint64)}
    return native.SampleTable(**(values | changes))


@pytest.mark.parametrize("changes", [
    {"kind": np.array([0, 3])}, {"kind": np.array([0, -1])}, {"kind": np.array([0])},
    {"temperature": np.array([1, 0], dtype=np.float32)}, {"temperature": np.array([1, np.nan], dtype=np.float32)},
    {"temperature": np.array([1, np.inf], dtype=np.float32)}, {"top_k": np.array([1, 0])}, {"top_k": np.array([1])},
    {"top_p": np.array([0.5, 0.0])}, {"top_p": np.array([0.5, 1.1])}, {"top_p": np.array([0.5, np.nan])},
    {"log_min_p": np.array([0.0, 0.1])}, {"log_min_p": np.array([0.0, np.nan])}])
def test_impossible_parameters_are_errors(changes):
    with pytest.raises(ValueError):
        table(2, **changes)


def test_other_dtypes_are_errors():
    with pytest.raises(TypeError):
        table(2, temperature=np.ones(2))
    with pytest.raises(TypeError):
        table(2, seed=np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(("changes", "error"), [
    ({"logits": np.zeros((2, 8), dtype=np.float32)}, ValueError),
    ({"logits": np.zeros((2, 9))}, TypeError),
    ({"logits": np.zeros((9, 2), dtype=np.float32).T}, TypeError),
    ({"logits": np.zeros(9, dtype=np.float32)}, TypeError),
    ({"at": np.array([0, 2])}, ValueError), ({"at": np.array([-1, 0])}, ValueError),
    ({"at": np.array([0])}, ValueError),
    ({"rows": np.array([0, 2])}, ValueError), ({"rows": np.array([0, -1])}, ValueError),
    ({"positions": np.array([0])}, ValueError), ({"tokens": np.zeros(1, dtype=np.int64)}, ValueError),
    ({"tokens": np.zeros(2, dtype=np.int32)}, TypeError), ({"top": np.zeros(3, dtype=np.float32)}, ValueError)])
def test_wrong_shapes_and_dtypes_are_errors(changes, error):
    right = {"logits": np.zeros((2, 9), dtype=np.float32), "at": np.arange(2), "rows": np.arange(2),
             "positions": np.arange(2), "tokens": np.zeros(2, dtype=np.int64), "top": np.zeros(2, dtype=np.float32)}
    sampler = native.Sampler(9)
    sampler.sample(table(2), **right)
    with pytest.raises(error):
        sampler.sample(table(2), **(right | changes))


def test_a_support_needs_a_row_and_its_width():
    sampler = native.Sampler(9)
    tokens, scores = sampler.support(table(1, top_k=np.array([4])), 0, np.arange(9, dtype=np.float32))
    assert tokens.tolist() == [8, 7, 6, 5] and scores.tolist() == [8.0, 7.0, 6.0, 5.0]
    with pytest.raises(ValueError):
        sampler.support(table(1), 1, np.zeros(9, dtype=np.float32))
    with pytest.raises(ValueError):
        sampler.support(table(1), 0, np.zeros(8, dtype=np.float32))


@pytest.mark.parametrize("width", [0, -5, 1 << 40])
def test_no_sampler_for_no_vocabulary(width):
    with pytest.raises(ValueError):
        native.Sampler(width)
