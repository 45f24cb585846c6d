"""The arithmetic of rooflines and of speculation: known figures, and the right forms where texts have wrong ones."""

from __future__ import annotations

import math
import random

import pytest

from paceline.errors import ConfigError
from paceline.plan.find import find_drafter
from paceline.plan.hardware import KNOWN, find_hardware
from paceline.plan.known import KNOWN as MODELS
from paceline.plan.known import find_shape, known_shape
from paceline.plan.planner import cycle_cost
from paceline.plan.read import read_shape
from paceline.plan.roofline import (
    Roofline,
    attention_intensity,
    decode_floor,
    forward_flops,
    mlp_intensity,
    smallest,
)
from paceline.plan.speculation import (
    acceptance_of,
    best_k,
    break_even,
    expected_accepted,
    expected_tokens,
    ranked_tree_tokens,
    speed_up,
    tree_nodes,
    tree_tokens,
)


def test_tokens_a_cycle() -> None:
    assert expected_tokens(0.7, 4) == pytest.approx(2.77, abs=5e-3)
    assert speed_up(0.7, 4, 0.1) == pytest.approx(1.98, abs=5e-3)


def test_texts_that_leave_out_the_bonus_are_wrong() -> None:
    a, k = 0.8, 5
    assert expected_tokens(a, k) == pytest.approx(3.69, abs=5e-3)
    assert (1 - a**k) / (1 - a) == pytest.approx(3.36, abs=5e-3)  # what circulates
    assert expected_accepted(a, k) == pytest.approx(a * (1 - a**k) / (1 - a)) == expected_tokens(a, k) - 1
    assert speed_up(a, k, 0.05) == pytest.approx(2.95, abs=5e-3)


def test_the_best_k_is_deeper_than_texts_say() -> None:
    assert best_k(0.8, 0.01) == 14
    assert speed_up(0.8, 14, 0.01) == pytest.approx(4.2, abs=0.05)
    assert best_k(0.3, 1.0) == 0


@pytest.mark.parametrize(("a", "k"), [(0.0, 3), (0.5, 1), (0.8, 5), (1.0, 4)])
def test_expectation_is_what_happens(a: float, k: int) -> None:
    dice = random.Random(0)
    cycles = 20_000
    total = 0
    for _ in range(cycles):
        accepted = next((depth for depth in range(k) if dice.random() >= a), k)
        total += accepted + 1
    assert total / cycles == pytest.approx(expected_tokens(a, k), rel=0.02)


def test_trees() -> None:
    assert tree_nodes((3, 3, 3, 3)) == 120
    assert tree_tokens(1.0, (4, 4, 4)) == 4  # never 5.26
    assert tree_tokens(0.7, (1, 1, 1, 1)) == pytest.approx(expected_tokens(0.7, 4))
    assert tree_tokens(0.5, (3, 3), sibling=1.0) == pytest.approx(1 + 0.875 + 0.875**2)
    assert expected_tokens(0.6, 3) < tree_tokens(0.6, (3, 2, 1)) < 4
    paths = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    assert ranked_tree_tokens(paths, [[0.6, 0.2], [0.5, 0.1]]) == pytest.approx(1 + 0.6 + 0.2 + 0.3 + 0.06 + 0.1)
    with pytest.raises(ConfigError, match="branches"):
        tree_tokens(0.5, (2, 0))


@pytest.mark.parametrize("k", [1, 4, 16])
def test_break_even(k: int) -> None:
    found = break_even(k, 1.0 + k * 0.1)
    assert found is not None and speed_up(found, k, 0.1) == pytest.approx(1.0)
    assert break_even(k, k + 1.5) is None
    assert break_even(k, 1.0) == pytest.approx(0.0, abs=1e-9)


def test_acceptance_behind_published_tokens() -> None:
    assert expected_tokens(acceptance_of(3.53, 7), 7) == pytest.approx(3.53)
    assert acceptance_of(9.0, 7) == 1.0


@pytest.mark.parametrize("a", [-0.1, 1.1, math.nan, True])
def test_acceptance_is_a_share(a: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"):
        expected_tokens(a, 3)


def test_an_h100() -> None:
    """3.35 TB/s, not the 8 that some texts have."""
    h100 = find_hardware("h100")
    assert h100.bandwidth == 3.35e12
    assert h100.ridge("bfloat16") == pytest.approx(295, abs=0.5)
    assert KNOWN["b200"].bandwidth == 8e12


def test_intensity() -> None:
    assert mlp_intensity(64) == 64
    assert mlp_intensity(64, 1.0) == 128
    assert attention_intensity(4096, 4096, 32, 32) == pytest.approx(4096 / 2)
    assert 0.99 < attention_intensity(1, 4096, 32, 32) < 1.0
    assert attention_intensity(1, 8192, 32, 8) == pytest.approx(4, rel=1e-3)
    assert forward_flops(8e9, 10) == 1.6e11


def test_where_compute_takes_over() -> None:
    dense = known_shape("llama-2-13b")
    mixture = known_shape("mixtral-8x7b")
    assert dense is not None and mixture is not None
    h100 = find_hardware("h100")
    batch = Roofline(dense, h100, "bfloat16", "bfloat16").compute_batch()
    assert batch == 296  # the first above 295.2
    # Every token of a mixture brings its share of the experts alone.
    sparse = Roofline(mixture, h100, "bfloat16", "bfloat16").compute_batch()
    assert sparse is not None and sparse > 3 * batch


@pytest.mark.parametrize("kv_heads", [40, 8])
@pytest.mark.parametrize("batch", [1, 64, 256])
def test_llama_2_13b_on_an_h100(kv_heads: int, batch: int) -> None:
    """The floor is weights and caches over the bandwidth, by hand."""
    context, h100 = 4096, find_hardware("h100")
    shape = read_shape({**MODELS["llama-2-13b"], "num_key_value_heads": kv_heads})
    token = 2 * 40 * kv_heads * 128 * 2
    assert shape.cache_bytes_per_token("float16") == token == {40: 819_200, 8: 163_840}[kv_heads]
    read = 2 * (shape.parameters - 32000 * 5120)  # rows of the embedding are looked up
    expected = (read + batch * token * (context + 1)) / 3.35e12
    found = Roofline(shape, h100, "float16", "float16").step(batch, 1, context)
    assert found.total == pytest.approx(expected, rel=1e-12)
    assert not found.compute_bound
    assert decode_floor(2 * shape.parameters, batch * token * context, 3.35e12) == pytest.approx(expected, rel=0.02)


def test_llama_2_13b_in_milliseconds() -> None:
    """Written out, so that a wrong formula on both sides would be noticed. Fewer heads have smaller matrices too:
    11.338 billion parameters, so 22.35 GB and 0.671 a text, where 40 have 25.70 and 3.356."""
    for kv_heads, floors in {40: (8.67, 71.79, 264.15), 8: (6.87, 19.50, 57.97)}.items():
        shape = read_shape({**MODELS["llama-2-13b"], "num_key_value_heads": kv_heads})
        roofline = Roofline(shape, find_hardware("h100"), "float16", "float16")
        assert [1e3 * roofline.decode(batch, 4096) for batch in (1, 64, 256)] == pytest.approx(floors, abs=0.01)


def test_prompts_are_arithmetic() -> None:
    shape = known_shape("llama-3.1-8b")
    assert shape is not None
    found = Roofline(shape, find_hardware("h200"), "bfloat16", "bfloat16").step(1, 2048, 0)
    assert found.compute_bound
    assert found.total == pytest.approx(forward_flops(7.0e9, 2048) / 989e12, rel=0.05)


def test_what_an_h200_was_measured_to_take() -> None:
    """Steps of an 8B shape, exact kernels, in ms: the constants of `sustained` are within 15 % of them."""
    shape = known_shape("llama-3.1-8b")
    assert shape is not None
    roofline = Roofline(shape, find_hardware("h200").sustained(), "bfloat16", "bfloat16")
    for batch, measured in {1: 4.44, 8: 4.71, 32: 5.37, 128: 7.66}.items():
        assert 1e3 * roofline.decode(batch, 640) == pytest.approx(measured, rel=0.15)
    assert 1e3 * roofline.prefill(2048) == pytest.approx(45.3, rel=0.15)
    plain = roofline.decode(1, 512)
    for rows, measured in {16: 1.12, 64: 1.27}.items():
        assert roofline.verify(1, rows, 512) / plain == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("a", "speed_ups"), [(0.4, (1.66, 1.25, 1.01)), (0.6, (2.06, 1.68, 1.31)),
                                              (0.8, (2.94, 2.48, 1.84))])
def test_what_drafts_were_measured_to_win_on_an_h200(a: float, speed_ups: tuple[float, ...]) -> None:
    """The 8B shape at 1, 8 and 32 requests, drafts of 4 that are right so often."""
    shape = find_shape("llama-3.1-8b")
    roofline = Roofline(shape, find_hardware("h200").sustained(), "bfloat16", "bfloat16")
    for batch, measured in zip((1, 8, 32), speed_ups):
        cost = cycle_cost(roofline, find_drafter("ngram", shape), batch, 640, 4)
        assert expected_tokens(a, 4) / cost == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("a", "speed_up"), [(0.4, 0.72), (0.6, 0.93), (0.8, 1.14)])
def test_what_three_drafts_for_each_of_many_were_measured_to_win(a: float, speed_up: float) -> None:
    """At 128 requests, where a step has no room for more."""
    shape = find_shape("llama-3.1-8b")
    roofline = Roofline(shape, find_hardware("h200").sustained(), "bfloat16", "bfloat16")
    cost = cycle_cost(roofline, find_drafter("ngram", shape), 128, 640, 3)
    assert expected_tokens(a, 3) / cost == pytest.approx(speed_up, rel=0.15)


def test_floors_of_low_bits_on_an_h200() -> None:
    shape = known_shape("llama-3.1-8b")
    assert shape is not None
    for dtype, least in {"bfloat16": 3.3, "fp8": 1.75, "int4": 1.0}.items():
        found = 1e3 * Roofline(shape, find_hardware("h200"), dtype, "bfloat16").decode(1, 1)
        assert found == pytest.approx(least, rel=0.08)


def test_more_cards_are_quicker_but_not_twice() -> None:
    shape = known_shape("llama-3.1-70b")
    assert shape is not None
    one, eight = (Roofline(shape, find_hardware(name).sustained(), "bfloat16", "bfloat16").decode(8, 1000)
                  for name in ("h200", "h200x8"))
    assert one / 8 < eight < one / 3


@pytest.mark.parametrize(("queries", "before", "window"), [
    (5, 0, None), (1, 9, None), (7, 3, 4), (3, 10, 4), (2, 1, 4)])
def test_pairs_are_those_the_mask_leaves(queries: int, before: int, window: int | None) -> None:
    from paceline.plan.shape import Mixer

    counted = sum(1 for query in range(before, before + queries) for key in range(query + 1)
                  if window is None or query - key < window)
    assert Mixer(0, "mha", window=window).pairs(queries, before) == counted


def test_smallest() -> None:
    assert [smallest(lambda n, least=least: n >= least, 100) for least in (1, 2, 57, 100)] == [1, 2, 57, 100]
    assert smallest(lambda n: False, 100) is None
