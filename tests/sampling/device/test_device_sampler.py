"""The device draws the tokens that the host's pipeline draws from the same logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from device_rows import Both, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.device import columns
from paceline.kernels.device.operands import Controls
from paceline.kernels.device.seats import SeatTables
from paceline.kernels.triton.sampling import sampler
from paceline.kernels.triton.sampling.sampler import TritonSampler
from paceline.request import SamplingParams

V = 100
token = st.integers(0, V - 1)


def maybe(strategy, default):
    return st.one_of(st.just(default), strategy)


@st.composite
def cases(draw) -> Case:
    params = SamplingParams(
        max_tokens=None,
        min_tokens=draw(maybe(st.integers(0, 6), 0)),
        temperature=draw(st.sampled_from([0.0, 1e-9, 0.3, 0.8, 1.0, 2.5, 1e6, 1e39])),
        top_k=draw(maybe(st.integers(0, V + 3), 0)),
        top_p=draw(maybe(st.sampled_from([1e-6, 0.1, 0.3, 0.5, 0.75, 0.95, 0.999999]), 1.0)),
        min_p=draw(maybe(st.sampled_from([1e-9, 0.05, 0.3, 1.0]), 0.0)),
        repetition_penalty=draw(maybe(st.sampled_from([0.5, 1.1, 2.0]), 1.0)),
        presence_penalty=draw(maybe(st.sampled_from([-1.0, 0.6]), 0.0)),
        frequency_penalty=draw(maybe(st.sampled_from([-0.5, 0.25]), 0.0)),
        logit_bias=draw(maybe(st.dictionaries(token, st.sampled_from([-np.inf, -3.0, 1.5, 100.0, np.inf]), max_size=6),
                              None)),
        no_repeat_ngram_size=draw(maybe(st.integers(1, 3), 0)),
        allowed_token_ids=draw(maybe(st.lists(token, min_size=1, max_size=12).map(tuple), None)),
        stop_token_ids=draw(maybe(st.lists(token, max_size=4).map(tuple), ())))
    if draw(st.booleans()):
        # Few distinct logits, so that ties are common.
        values = st.sampled_from([-40.0, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 2.0000002, 3.0, -np.inf])
        logits = draw(st.lists(values, min_size=V, max_size=V))
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        logits = rng.standard_normal(V) * draw(st.sampled_from([0.01, 1.0, 8.0]))
    return Case(params, np.array(logits, dtype=np.float32), prompt=draw(st.lists(token, min_size=1, max_size=8)),
                output=draw(st.lists(token, max_size=6)), path=draw(st.lists(token, max_size=4)),
                mask=draw(maybe(st.lists(st.booleans(), min_size=V, max_size=V), None)),
                seed=draw(st.integers(0, 2**64 - 1)), eos=(3,))


@settings(max_examples=15, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=3), st.sampled_from([4, 8192]))
def test_any_mixture_of_rows_draws_the_hosts_tokens(device, batch, window_room):
    both = Both(batch, V, device, window_room=window_room)
    assert both.device() == both.host()
    for i, token in enumerate(both.drawn_or_why_not()):
        assert (token == columns.EMPTY) == (i in both.processed.errors)


def rows_of(width: int, params: list[SamplingParams], scale: float = 2.0) -> list[Case]:
    rng = np.random.default_rng(width)
    return [Case(p, (rng.standard_normal(width) * scale).astype(np.float32), seed=1000 + i)
            for i, p in enumerate(params)]


EVERY_KIND = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=1.3, top_k=300, top_p=0.8),
    SamplingParams(min_p=0.02),
    SamplingParams(top_k=900, top_p=0.9, min_p=0.001),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 9.0}, top_p=0.99),
]


@pytest.mark.parametrize(("width", "block"), [(50, 64), (2999, 1024)])
def test_every_kind_of_row(device, width, block):
    both = Both(rows_of(width, EVERY_KIND), width, device, block=block)
    assert both.device() == both.host()


@pytest.mark.parametrize("window_room", [1, 20])
def test_where_a_cut_is_found_does_not_change_it(device, window_room):
    """In the coarse window, in a fine one, or, where they hold more than fits, in the whole row."""
    params = [p for p in EVERY_KIND if p.top_k or p.top_p < 1.0]
    both = Both(rows_of(500, params, scale=0.5), 500, device, block=256, window_room=window_room)
    assert both.device() == both.host()


def test_a_cut_at_the_end_of_a_window_leaves_out_what_follows_at_once(device):
    """Windows end a power of two below the best score; here the next token comes one unit in the last place later."""
    x = np.full(64, -1e4, dtype=np.float32)
    x[0], x[5] = 3.0, 2.0
    x[6] = np.nextafter(x[5], np.float32(-9))
    both = Both([Case(SamplingParams(top_k=2, temperature=1.0), x, seed=seed) for seed in range(8)], 64, device)
    tokens = both.device()
    assert tokens == both.host() and set(tokens) == {0, 5}


@pytest.mark.parametrize("block", [32, 512])
def test_the_split_over_programs_does_not_change_a_bit(device, block):
    both = Both(rows_of(160, EVERY_KIND[1:5]), 160, device, block=block)
    assert both.device() == both.host()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_the_width_are_widened_first(device, dtype):
    both = Both(rows_of(200, EVERY_KIND[:4]), 200, device, block=128, dtype=dtype)
    assert both.device() == both.host()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=3, seed=1),
                                    SamplingParams(top_p=0.5), SamplingParams(top_k=70, top_p=0.5),
                                    SamplingParams(temperature=1e-9, top_k=2), SamplingParams(min_p=1.0)])
def test_rows_of_equal_logits(device, params):
    """Ties go to the lowest id, at the boundary of a cut too; the noise decides among what is left."""
    logits = [np.full(V, value, dtype=np.float32) for value in (0.0, 7.25)]
    logits.append(np.where(np.arange(V) % 2 == 0, np.float32(0.0), np.float32(-0.0)))
    both = Both([Case(params, x, seed=i) for i, x in enumerate(logits)], V, device)
    tokens = both.device()
    assert tokens == both.host()
    if params.temperature == 0.0:
        assert tokens == [0] * len(logits)
    if params.top_k == 3:
        assert all(one < 3 for one in tokens)


def test_rows_without_a_token_say_why_and_disturb_nobody(device):
    nothing, good = np.full(V, -np.inf, dtype=np.float32), np.linspace(-3, 3, V, dtype=np.float32)
    broken = good.copy()
    broken[77] = np.nan
    hidden = {"allowed_token_ids": (1, 2)}
    both = Both([Case(SamplingParams(temperature=t, **extra), x)
                 for t in (0.0, 1.0) for extra in ({}, {"top_k": 5}, {"top_p": 0.5}, hidden)
                 for x in (nothing, broken, good)], V, device)
    assert both.device() == both.host()
    tokens = both.drawn_or_why_not()
    assert tokens[::3] == [columns.EMPTY] * 8 and tokens[1::3] == [columns.NAN] * 8
    assert min(tokens[2::3]) >= 0


def test_rows_of_a_draft_stand_below_their_seats_text(device):
    """Ever deeper ones: what min_tokens keeps out may come from some depth on, and what was drafted counts."""
    params = [SamplingParams(temperature=0.0, presence_penalty=60.0),
              SamplingParams(min_tokens=2, stop_token_ids=(7, 8), logit_bias={7: 90.0, 8: 80.0})] * 3
    cases = [dataclasses.replace(case, path=[4] * i) for i, case in enumerate(rows_of(50, params))]
    for case in cases[::2]:
        case.logits[4] = 30.0
    both = Both(cases, 50, device)
    tokens = both.device()
    assert tokens == both.host()
    assert [token == 4 for token in tokens[::2]] == [True, False, False]
    assert [token in (7, 8) for token in tokens[1::2]] == [False, True, True]


def test_a_call_leaves_nothing_behind_for_the_next(device):
    both = Both(rows_of(120, EVERY_KIND[3:]), 120, device)
    first = both.device()
    assert both.device() == first
    both.draw(logprobs=3)
    assert both.device() == first


def test_logits_are_read_and_never_written(device):
    both = Both(rows_of(60, EVERY_KIND), 60, device)
    before = both.device_logits.clone()
    both.device()
    assert torch.equal(both.device_logits.cpu().nan_to_num(), before.cpu().nan_to_num())


def test_controls_name_what_the_seats_need(device):
    both = Both(rows_of(100, [SamplingParams(), SamplingParams(top_k=3), SamplingParams(presence_penalty=1.0)]), 100,
                device)
    assert both.state.controls([1]) == Controls()
    assert both.state.controls([2]) == Controls(truncation=True)
    assert both.state.controls([3, 1]) == Controls(edits=True)
    assert both.state.controls(logprobs=2) == Controls(edits=True, truncation=True, logprobs=2)


def test_masks_alone_bring_the_tables_along(device):
    """Rows of requests that have ended meanwhile are edited too: what their seats name must be there."""
    tables = SeatTables(2, V, device)
    TritonSampler(tables, 2).prepare(Controls(masks=True))
    assert tables.counts is not None and tables.masks is not None


def test_a_seat_is_taken_over_whole(device):
    """Whoever sits down next gets nothing of the one before: no counts, no bias, no mask."""
    heavy = SamplingParams(temperature=0.0, presence_penalty=50.0, logit_bias={9: 70.0}, allowed_token_ids=(9, 10))
    light = SamplingParams(temperature=0.0, frequency_penalty=0.01)
    logits = np.linspace(0, 5, V, dtype=np.float32)
    both = Both([Case(heavy, logits, output=[V - 1])], V, device)
    assert both.device() == both.host() == [9]
    after = Both([Case(light, logits)], V, device)
    both.state.assign([dataclasses.replace(_seated(after), seat=1)])
    both.rows = after.rows
    assert both.device() == both.host() == [V - 1]


def _seated(both: Both):
    from paceline.sampling.device.state import Seated
    return Seated(1, both.rows[0].state, both.rows[0].position)


def test_a_request_with_too_long_a_list_is_refused(device):
    many = SamplingParams(logit_bias=dict.fromkeys(range(17), 1.0))
    with pytest.raises(ValueError, match="17 tokens and there is room for 16"):
        Both([Case(many, np.zeros(V))], V, device)


def test_shapes_are_checked(device):
    both = Both(rows_of(100, EVERY_KIND[:1]), 100, device)
    with pytest.raises(ValueError, match="expected logits"):
        both.sampler.sample(both.device_logits[:, :50], both.device_rows, Controls())
    with pytest.raises(ValueError, match="parents and fed"):
        rows = dataclasses.replace(both.device_rows, parents=both.device_rows.seats)
        both.sampler.sample(both.device_logits, rows, Controls())
    with pytest.raises(ValueError, match="masks, masked and controls"):
        both.sampler.sample(both.device_logits, both.device_rows, Controls(masks=True))
    with pytest.raises(ValueError, match="seats must be"):
        both.sampler.sample(both.device_logits[:1], both.device_rows, Controls())


@pytest.mark.parametrize("broken", ["count_kernel", "gather_kernel", "threshold_kernel", "sample_kernel"])
def test_a_call_that_breaks_between_two_launches_leaves_nothing_behind(device, monkeypatch, broken):
    """The rows before it have far better scores, which must not be taken for those of the rows after it."""
    params = [SamplingParams(top_p=0.6), SamplingParams(top_k=5), SamplingParams(min_p=0.2), SamplingParams()]
    both = Both(rows_of(160, params), 160, device, block=64)
    own = both.device_logits.clone()

    class Broken:
        def __getitem__(self, grid):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sampler, broken, Broken())
        both.device_logits += 100.0
        both.draw(logprobs=1)
    both.device_logits.copy_(own)
    assert both.device() == both.host()
