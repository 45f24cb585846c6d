"""What the pipeline promises beyond each processor: rows never feel their neighbours, draws follow the
distribution, and trouble stays in its row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slow_pipeline import choose as slow_choose
from slow_pipeline import support as slow_support

from paceline.errors import EmptySupportError, RequestError
from paceline.request import SamplingParams
from paceline.sampling import NO_TOKEN, Pipeline, SampleRow, SampleState
from paceline.sampling.logprobs import token_logprobs
from paceline.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel, token_bits

pytestmark = pytest.mark.usefixtures("either_sampler")

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 3.0, "top_p": 0.9999},
    {"temperature": 0.7, "top_k": 40},
    {"top_k": 900, "top_p": 0.8},
    {"min_p": 0.05, "temperature": 1.3},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"allowed_token_ids": tuple(range(0, 3001, 7))},
]


def language_like(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * 2.5
    peaks = torch.randint(0, width, (rows, 40), generator=generator)
    return logits.scatter(1, peaks, torch.rand(rows, 40, generator=generator) * 14)


def row_of(kind: dict, index: int, width: int, path=()) -> SampleRow:
    state = SampleState(SamplingParams(max_tokens=None, **kind), [1, 2, 3, index], 1000 + index, width, [0])
    state.append([5, 6, 5])
    return SampleRow(state, 7 + len(path), path)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_alone_is_the_row_among_strangers(threads):
    """Bitwise: scores and tokens, in a batch of 33 of mixed kinds, in any order, at 1 and 2 threads."""
    width = 3001
    logits = language_like(33, width)
    rows = [row_of(KINDS[i % len(KINDS)], i, width, (9, 5) if i % 3 == 0 else ()) for i in range(33)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = []
        for i in range(33):
            pipeline = Pipeline(width)
            processed = pipeline.process(logits[i:i + 1].clone(), rows[i:i + 1])
            alone.append((pipeline.choose(processed)[0], processed.scores[0], processed.probs(0)))
        torch.set_num_threads(threads)
        pipeline = Pipeline(width)
        for order in (range(33), reversed(range(33)), [*range(7, 33), *range(7)]):
            order = list(order)
            processed = pipeline.process(logits[order], [rows[i] for i in order])
            chosen = pipeline.choose(processed)
            for at, i in enumerate(order):
                assert chosen[at] == alone[i][0]
                assert torch.equal(processed.scores[at], alone[i][1])
                assert (processed.probs(at) == alone[i][2]).all()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.get("temperature", 1.0) > 0])
def test_big_vocabularies_through_every_window_equal_the_slow_reading(kind):
    """Flat rows need the widest window, peaked ones the narrowest: the support is the slow one's in all."""
    width = 1500
    kind = {key: value for key, value in kind.items() if key in ("temperature", "top_k", "top_p", "min_p")}
    logits = language_like(4, width, seed=3)
    logits[1] *= 0.01
    logits[2] *= 4.0
    logits[3] = (logits[3] * 2).round() / 2
    rows = [row_of(kind, i, width) for i in range(4)]
    pipeline = Pipeline(width)
    processed = pipeline.process(logits, rows)
    chosen = pipeline.choose(processed)
    for i, row in enumerate(rows):
        scores = slow_support(logits[i].numpy(), row.state.params)
        tokens, values = processed.support(i)
        assert dict(zip(tokens.tolist(), values.tolist())) == {t: float(s) for t, s in scores.items()}
        assert chosen[i] == slow_choose(scores, row.state.params, row.state.seed, row.position)


def test_tables_too_big_to_sort_at_once_are_halved(monkeypatch):
    width = 3001
    logits = language_like(9, width, seed=8)
    rows = [row_of(KINDS[(1, 3, 5, 7)[i % 4]], i, width) for i in range(9)]
    whole = Pipeline(width).process(logits, rows).scores
    monkeypatch.setattr("paceline.sampling.truncation._PADDED", 200)
    assert torch.equal(Pipeline(width).process(logits, rows).scores, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_rows_on_a_device():
    """Tokens and supports as on the CPU; each row alone as in the batch."""
    width = 20_001
    logits = language_like(33, width)
    kinds = [{**kind, "min_tokens": 5} for kind in KINDS]
    rows = [row_of(kinds[i % len(kinds)], i, width, (9, 5) if i % 3 == 0 else ()) for i in range(33)]
    pipeline = Pipeline(width)
    here, there = pipeline.process(logits, rows), pipeline.process(logits.cuda(), rows)
    assert torch.equal(here.scores, there.scores.cpu())
    chosen = pipeline.choose(there)
    assert pipeline.choose(here) == chosen
    for i in range(33):
        assert pipeline.sample(logits[i:i + 1].cuda(), rows[i:i + 1]) == [chosen[i]]
    ours = token_logprobs(logits, here, range(33), chosen, [2] * 33)
    theirs = token_logprobs(logits.cuda(), there, range(33), chosen, [2] * 33)
    for a, b in zip(ours, theirs):
        assert (a.rank, list(a.top)) == (b.rank, list(b.top))
        assert abs(a.raw - b.raw) < 1e-5 and abs(a.processed - b.processed) < 1e-5


def test_tokens_ruled_out_before_their_noise_is_computed_could_not_have_won():
    """The pruned draw equals the argmax over everything, on rows built so that outsiders do win."""
    width = 20_000
    pipeline = Pipeline(width)
    generator = torch.Generator().manual_seed(1)
    far_wins = 0
    for trial in range(60):
        flat = torch.randn(1, width, generator=generator) * 0.3
        flat[0, trial] = 7.0 + trial % 4
        flat *= (1.0, 1.0, 1e-3, 1e4)[trial // 15]
        state = SampleState(SamplingParams(), [1], trial, width)
        chosen = pipeline.sample(flat, [SampleRow(state, 5)])[0]
        everything = flat[0].numpy() + gumbel(token_bits(trial, 5, np.arange(width)))
        assert chosen == int(everything.argmax())
        far_wins += flat[0, chosen] < flat[0].max() - 6.0
    assert far_wins >= 10, "otherwise this proves nothing about far tokens"


def test_noise_is_bounded_so_a_gap_of_its_range_decides():
    worst = np.array([0, 2**32 - 1], dtype=np.uint32)
    most, least = gumbel(worst)
    assert GUMBEL_MIN < least < most < GUMBEL_MAX and GUMBEL_MAX - GUMBEL_MIN < 25.8
    for scale in (1.0, 100.0, 1e4, 1e6, 1e8):
        best = np.float32(scale)
        below = np.float32(best - 25.8 - abs(scale) * 2.0**-20)
        assert np.float32(below + most) < np.float32(best + least)


def test_draws_follow_the_distribution():
    """20,000 positions of one seed: a chi-square over the support stays below its far quantile."""
    width, draws = 12, 20_000
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 3.0, 2.5, -2.0, 0.25]])
    state = SampleState(SamplingParams(temperature=0.9, top_k=10), [1], 42, width)
    pipeline = Pipeline(width)
    rows = [SampleRow(state, position) for position in range(1, draws + 1)]
    processed = pipeline.process(logits.expand(draws, width), rows)
    counts = np.bincount(pipeline.choose(processed), minlength=width)
    expected = processed.probs(0) * draws
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert kept.sum() == 10
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 27.9, "the 0.999 quantile for 9 degrees of freedom"


def test_seeds_and_positions_draw_independently():
    width = 8
    pipeline = Pipeline(width)
    logits = torch.zeros(1000, width)
    states = [SampleState(SamplingParams(), [1], seed, width) for seed in range(1000)]
    by_seed = pipeline.sample(logits, [SampleRow(state, 3) for state in states])
    by_position = pipeline.sample(logits, [SampleRow(states[0], position) for position in range(1, 1001)])
    for draws in (by_seed, by_position):
        assert np.abs(np.bincount(draws, minlength=width) - 125).max() < 45


def support_of(logits: list[float], **params) -> list[int]:
    state = SampleState(SamplingParams(**params), [0], 1, len(logits))
    processed = Pipeline(len(logits)).process(torch.tensor([logits]), [SampleRow(state, 1)])
    return sorted(processed.support(0)[0].tolist())


def test_ties_go_to_the_lowest_id():
    assert support_of([1.0, 2.0, 2.0, 2.0, 1.0], top_k=2) == [1, 2]
    assert support_of([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]
    assert support_of([-0.0, 0.0, -0.0, 0.0], top_k=3) == [0, 1, 2]
    assert support_of([5.0, 5.0, 5.0], temperature=0.0) == [0]
    assert support_of([1.0, 5.0, 5.0], temperature=1e-20) == [1]


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    assert support_of(logits, top_p=0.49) == [0]
    assert support_of(logits, top_p=0.51) == [0, 1]
    assert support_of(logits, top_p=0.74) == [0, 1]
    assert support_of(logits, top_p=0.76) == [0, 1, 2]
    assert support_of(logits, top_p=1e-9) == [0]


def test_top_p_shares_out_what_top_k_left():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert support_of(logits, top_p=0.5) == [0, 1]
    assert support_of(logits, top_p=0.5, top_k=2) == [0]


def test_min_p_is_relative_to_the_best():
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert support_of(logits, min_p=0.2) == [0, 1, 2]
    assert support_of([2.0, 2.0, 1.999], min_p=1.0) == [0, 1]


def test_top_k_of_the_vocabulary_or_more_is_off():
    assert support_of([1.0, 2.0, 3.0], top_k=3) == support_of([1.0, 2.0, 3.0], top_k=99) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-11, 1e-9, 1e-3, 1e6, 1e38, 1e300])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("top", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_extreme_temperatures_and_logits_stay_defined(temperature, scale, top):
    logits = torch.tensor([[3.0, -1.0, 2.0, -3.0]]) * scale
    state = SampleState(SamplingParams(temperature=temperature, **top), [1], 3, 4)
    pipeline = Pipeline(4)
    processed = pipeline.process(logits, [SampleRow(state, 1)])
    assert not processed.errors
    probs = processed.probs(0)
    assert np.isfinite(probs).all() and abs(probs.sum() - 1) < 1e-12
    chosen = pipeline.choose(processed)[0]
    assert probs[chosen] > 0
    if temperature < 1e-3 * scale:
        assert chosen == 0


def test_infinite_logits_are_certain():
    for params in ({}, {"top_p": 0.9}, {"temperature": 0.0}):
        state = SampleState(SamplingParams(**params), [1], 3, 4)
        assert Pipeline(4).sample(torch.tensor([[1.0, 2.0, np.inf, -np.inf]]), [SampleRow(state, 1)]) == [2]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"allowed_token_ids": (1,)}])
def test_nan_fails_its_row_alone(kind):
    width = 16
    rows = [row_of(kind, i, width) for i in range(3)]
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    pipeline = Pipeline(width)
    healthy = pipeline.sample(logits[[0, 2]], [rows[0], rows[2]])
    logits[1, 4] = torch.nan
    processed = pipeline.process(logits, rows)
    chosen = pipeline.choose(processed)
    assert [chosen[0], chosen[2]] == healthy and chosen[1] == NO_TOKEN
    assert list(processed.errors) == [1] and "NaN" in str(processed.errors[1])
    assert not isinstance(processed.errors[1], EmptySupportError)
    with pytest.raises(RequestError, match="NaN"):
        processed.probs(1)
    with pytest.raises(RequestError, match="NaN"):
        pipeline.sample(logits, rows)
    assert (processed.scores[1] == -torch.inf).all()


def empty(policy: str) -> SampleRow:
    params = SamplingParams(temperature=0.0, allowed_token_ids=(2,), logit_bias={3: 9.0}, stop_token_ids=(0,),
                            min_tokens=3, on_empty_support=policy)
    return SampleRow(SampleState(params, [1], 0, 4, [1], [(2,)]), 1)


def test_an_empty_support_is_what_its_request_said():
    pipeline = Pipeline(4)
    rows = [empty("error"), empty("stop"), empty("unmasked"), row_of({"temperature": 0.0}, 1, 4)]
    processed = pipeline.process(torch.tensor([[5.0, 4.0, 3.0, -1.0]] * 4), rows)
    assert pipeline.choose(processed) == [NO_TOKEN, NO_TOKEN, 3, 0]
    assert isinstance(processed.errors[0], EmptySupportError) and list(processed.errors) == [0]
    assert processed.stopped == {1} and processed.unmasked == {2}
    with pytest.raises(RequestError):
        processed.support(1)


def test_unmasked_lifts_masks_but_not_min_tokens():
    params = SamplingParams(temperature=0.0, allowed_token_ids=(0,), stop_token_ids=(0, 1), min_tokens=2,
                            on_empty_support="unmasked")
    state = SampleState(params, [3], 0, 2)
    processed = Pipeline(2).process(torch.tensor([[5.0, 4.0]]), [SampleRow(state, 1)])
    assert isinstance(processed.errors[0], EmptySupportError)


def test_draft_nodes_see_their_ancestors_as_output():
    """A node with a path draws what the sequence would draw after committing that path."""
    width = 50
    logits = language_like(1, width, seed=5)
    for kind in KINDS:
        kind = {**kind, "no_repeat_ngram_size": 2, "min_tokens": 5}
        if "allowed_token_ids" in kind:
            kind["allowed_token_ids"] = tuple(range(0, 50, 3))
        as_draft = row_of(kind, 3, width, (7, 7, 5))
        committed = row_of(kind, 3, width)
        committed.state.append([7, 7, 5])
        plain = SampleRow(committed.state, as_draft.position)
        pipeline = Pipeline(width)
        processed = pipeline.process(logits.repeat(2, 1), [as_draft, plain])
        assert torch.equal(processed.scores[0], processed.scores[1])
        assert len(set(pipeline.choose(processed))) == 1


def test_processors_are_named_in_the_order_they_act():
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_p=0.1, repetition_penalty=2.0, min_tokens=2,
                            logit_bias={1: 1.0}, no_repeat_ngram_size=3, stop_token_ids=(1,))
    state = SampleState(params, [1], 0, 4)
    mask = torch.tensor([True, True, False, True])
    processed = Pipeline(4).process(torch.zeros(2, 4), [SampleRow(state, 1, (), mask), SampleRow(state, 3, (2, 2))])
    assert processed.processors(0) == ("repetition_penalty", "logit_bias", "no_repeat_ngram_size", "min_tokens",
                                       "grammar", "temperature", "top_k", "top_p", "min_p")
    assert "min_tokens" not in processed.processors(1) and "grammar" not in processed.processors(1)


def test_parameter_tables_follow_the_states():
    """Tables are kept between calls; another list of states must never meet the old one's parameters."""
    width = 8
    pipeline = Pipeline(width)
    logits = torch.arange(width, dtype=torch.float32)[None].repeat(2, 1)
    greedy = [row_of({"temperature": 0.0}, i, width) for i in range(2)]
    only = [row_of({"temperature": 0.0, "allowed_token_ids": (i,)}, i, width) for i in range(2)]
    for _ in range(3):
        assert pipeline.sample(logits, greedy) == [7, 7]
        assert pipeline.sample(logits, only) == [0, 1]
        assert pipeline.sample(logits, [greedy[0], only[1]]) == [7, 1]
        assert pipeline.sample(logits, only[::-1]) == [1, 0]
        assert pipeline.sample(logits[:1], greedy[:1]) == [7]


def test_half_precision_and_strided_logits_are_taken_as_they_are():
    state = SampleState(SamplingParams(temperature=0.0), [1], 0, 4)
    logits = torch.tensor([[0.0, 3.0], [1.0, 2.0], [5.0, 1.0], [2.0, 0.0]]).T
    assert Pipeline(4).sample(logits, [SampleRow(state, 1)] * 2) == [2, 0]
    assert Pipeline(4).sample(logits.bfloat16(), [SampleRow(state, 1)] * 2) == [2, 0]


def test_no_rows_and_wrong_shapes():
    assert Pipeline(4).sample(torch.zeros(0, 4), []) == []
    with pytest.raises(ValueError, match="expected logits"):
        Pipeline(4).process(torch.zeros(1, 5), [row_of({}, 0, 4)])
