"""Drafters that run a model: whatever they guess, and whatever happens around them, the text is that of plain decoding.

The second half is about the guesses: a model that is the target guesses right, one that is not guesses wrong.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.test_equality_matrix import preempt_at
from engine.tiny import VOCAB
from paceline import SamplingParams
from paceline.engine.drafting.cached_models import OwnCacheModel
from paceline.errors import RequestError
from paceline.kernels import cpu
from pairwise import pairwise
from speculation.model_drafting import FAST, METHODS, PROMPT, Watch, drafting_llm

NEW = 16
SEED = 1234567
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40},
    "controlled": {"temperature": 1.1, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
                   "logit_bias": {5: 1.5, 9: -2.0}, "no_repeat_ngram_size": 3},
}
KINDS = ["llama", "qwen2", pytest.param("native", marks=pytest.mark.skipif(
    cpu.load() is None, reason="the native kernels are not built here"))]
CIRCUMSTANCES = ("alone", "batch", "warm", "chunks", "preempted", "crowded", "ahead")
FIXED = {"k": 4, "adaptive": False}


def params(style: str, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NEW, "ignore_eos": True, "seed": SEED} | STYLES[style] | changes))


@functools.cache
def plain(kind: str, style: str) -> list[int]:
    torch.set_num_threads(1)
    tokens: list[int] = drafting_llm(kind).generate([PROMPT], params(style))[0].outputs[0].token_ids
    assert len(tokens) == NEW and len(set(tokens)) > 5
    return tokens


def neighbours(count: int) -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    """Other requests: some share our prompt's beginning, some draft (with siblings of their own), one does not."""
    methods = ["draft, full tree", None, "exit", "cascade"]
    return ([PROMPT[:9 * (i % 2)] + PROMPT[i:i + 35] for i in range(count)],
            [SamplingParams(max_tokens=6 + 3 * i, temperature=0.4 * i, seed=i, n=1 + i % 2, ignore_eos=True)
             for i in range(count)],
            [None if name is None else METHODS[name] | FIXED for name in methods[:count]])


def check_equal(kind: str, style: str, wish: dict[str, Any], circumstance: str) -> None:
    """The text is plain decoding's, the drafter did not fail, no block is lost."""
    options: dict[str, Any] = {"alone": {}, "batch": {}, "warm": {}, "preempted": {},
                               "chunks": {"max_prefill_chunk": 7, "max_batch_tokens": 40},
                               "crowded": {"kv_blocks": 16, "max_model_len": 120, "watermark": 0.0},
                               "ahead": {"schedule_ahead": True}}[circumstance]
    llm = drafting_llm(kind, **options)
    if circumstance == "warm":
        llm.generate([[*PROMPT, 3]], params(style, max_tokens=9), speculation=wish | FIXED)
    prompts, their_params, wishes = neighbours(0 if circumstance == "alone" else 4)
    place = min(2, len(prompts))
    prompts.insert(place, list(PROMPT))
    their_params.insert(place, params(style))
    wishes.insert(place, wish | FIXED)
    if circumstance == "preempted":
        preempt_at(llm, place, steps=(2, 5, 9))
    outs = llm.generate(prompts, their_params, speculation=wishes)
    out = outs[place]
    assert out.error is None
    assert out.outputs[0].token_ids == plain(kind, style)
    assert [other.speculation.failure for other in outs if other.speculation is not None] == [None] * (
        len(outs) - wishes.count(None))
    assert out.speculation.drafted > 0
    if circumstance == "crowded" and kind != "mistral":  # its window frees blocks as fast as it takes them
        assert llm.engine.metrics.preemptions > 0, "this is meant to run out of blocks"
    nothing_left(llm)


def nothing_left(llm: Any) -> None:
    """Everybody is gone: no block, no seat, no record of a sequence may remain."""
    llm.engine.cache.check([])
    for model, _ in llm.engine.draft_models._loaded.values():
        assert isinstance(model, OwnCacheModel)
        assert not model._held
        model.check()


def sample() -> list[Any]:
    """Every method on native kernels, every other one in torch; styles and circumstances take turns. `make test-full`
    runs all."""
    cells = []
    styles, circumstances, torch_kinds = (itertools.cycle(x) for x in (STYLES, CIRCUMSTANCES, ("llama", "qwen2")))
    for number, name in enumerate(METHODS):
        for kind in (KINDS[-1],) if number % 2 else (next(torch_kinds), KINDS[-1]):
            values, marks = (kind.values[0], kind.marks) if not isinstance(kind, str) else (kind, ())
            cells.append(pytest.param(values, next(styles), name, next(circumstances), marks=marks))
    return cells


@pytest.mark.parametrize("kind, style, name, circumstance", sample())
def test_the_text_is_plain_decodings(kind: str, style: str, name: str, circumstance: str) -> None:
    check_equal(kind, style, METHODS[name], circumstance)


@pytest.mark.full
@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", [*KINDS, "mixtral", "mistral", "qwen3"])
def test_the_whole_table(kind: str, style: str, name: str, circumstance: str) -> None:
    check_equal(kind, style, METHODS[name], circumstance)


CONTROLS = st.fixed_dictionaries({}, optional={
    "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.7]), "top_k": st.integers(0, 30),
    "top_p": st.floats(0.3, 1.0), "min_p": st.floats(0.0, 0.2), "repetition_penalty": st.floats(0.8, 1.5),
    "presence_penalty": st.floats(-1.0, 1.0), "frequency_penalty": st.floats(-1.0, 1.0),
    "no_repeat_ngram_size": st.integers(0, 3), "n": st.integers(1, 3), "seed": st.integers(0, 1 << 63),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), max_size=4)})


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(CONTROLS, st.sampled_from([*METHODS]), st.integers(1, 6)), min_size=1, max_size=5),
       st.sampled_from(["llama", "native"]), st.booleans())
def test_random_controls_and_mixed_methods(cases: list[tuple[dict[str, Any], str, int]], kind: str,
                                           crowded: bool) -> None:
    if kind == "native" and cpu.load() is None:
        kind = "qwen2"
    options = {"kv_blocks": 30, "max_model_len": 110, "watermark": 0.0} if crowded else {}
    prompts = [PROMPT[index:index + 20 + 11 * index] for index in range(len(cases))]
    wanted = [SamplingParams(**({"max_tokens": 14, "ignore_eos": True, "seed": 3} | controls))
              for controls, _, _ in cases]
    texts = []
    for wishes in ([None] * len(cases), [METHODS[name] | {"k": k, "adaptive": False} for _, name, k in cases]):
        llm = drafting_llm(kind, **options)
        outs = llm.generate(prompts, wanted, speculation=wishes)
        texts.append([[sample.token_ids for sample in out.outputs] for out in outs])
        assert all(out.speculation is None or out.speculation.failure is None for out in outs)
        nothing_left(llm)
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- how good the guesses are


@pytest.mark.parametrize("kind, style", [("llama", "controlled"), *((FAST, style) for style in STYLES)])
def test_the_targets_own_weights_guess_everything_and_others_little(kind: str, style: str) -> None:
    llm = drafting_llm(kind)
    same, other = (llm.generate([PROMPT], params(style, max_tokens=21), speculation={
        "method": "draft", "model": model} | FIXED)[0].speculation for model in ("same", "other"))
    assert same.accepted == same.drafted == 16, "20 tokens after the first, in cycles of 5"
    assert other.accepted < 0.2 * other.drafted


@pytest.mark.parametrize("wish", [{"method": "skip", "skip": ["attn.1"]}, {"method": "exit", "layers": 3},
                                  {"method": "precision", "bits": 8}, {"method": "precision", "bits": 4}])
def test_a_reduced_target_guesses_better_than_chance(wish: dict[str, Any]) -> None:
    llm = drafting_llm("llama")
    stats = llm.generate([PROMPT], params("greedy", max_tokens=40), speculation=wish | FIXED)[0].speculation
    assert stats.accepted > 0.08 * stats.drafted, "a guess at random would be right once in 97 times"
    if wish.get("bits") == 8:
        assert stats.accepted > 0.8 * stats.drafted


def test_siblings_are_accepted_where_the_first_guess_is_wrong() -> None:
    llm = drafting_llm()
    lengths = [llm.generate([PROMPT], params("seeded", max_tokens=80), speculation={
        "method": "exit", "layers": 3, "branches": branches} | FIXED)[0].speculation.mean_accepted_length
        for branches in (1, 4)]
    assert lengths[1] > lengths[0] * 1.05


def test_after_full_acceptance_two_tokens_are_read() -> None:
    """The last drafted token was never read, and one more came with it."""
    llm = drafting_llm()
    watch = Watch(llm, {"method": "draft", "model": "same"} | FIXED)
    runner, widths = watch.drafter.model._runner, []
    run = runner.run_rows

    def counted(groups: Any) -> Any:
        widths.append([len(group.tokens) for group in groups])
        return run(groups)

    runner.run_rows = counted
    llm.generate([PROMPT], params("greedy", max_tokens=16), speculation={"method": "draft", "model": "same"} | FIXED)
    assert widths[0] == [len(PROMPT)], "first the prompt is caught up with"
    assert widths[1:9] == [[1], [1], [1], [1], [2], [1], [1], [1]]


def test_a_long_prompt_is_caught_up_with_in_chunks_while_the_text_goes_on() -> None:
    llm = drafting_llm(max_batch_tokens=32)
    watch = Watch(llm, {"method": "draft", "model": "same"} | FIXED)
    out = llm.generate([PROMPT], params("greedy"), speculation={"method": "draft", "model": "same"} | FIXED)[0]
    assert out.outputs[0].token_ids == plain(FAST, "greedy")
    assert [tree is None for _, tree in watch.proposals[:3]] == [True, True, False]


def test_a_small_draft_cache_costs_drafts_never_text() -> None:
    """Blocks for two sequences at most, six that draft together: whoever drafted longest ago loses its cache."""
    llm = drafting_llm()
    prompts = [PROMPT[i:i + 40] for i in range(6)]
    plainly = [out.outputs[0].token_ids for out in llm.generate(prompts, params("seeded"))]
    wish = {"method": "draft", "model": "same", "cache_tokens": 130} | FIXED
    outs = llm.generate(prompts, params("seeded"), speculation=wish)
    assert [out.outputs[0].token_ids for out in outs] == plainly
    assert sum(out.speculation.accepted for out in outs) > 0
    assert all(out.speculation.failure is None for out in outs)
    nothing_left(llm)


def test_drafting_starts_from_the_draft_models_own_prefix_cache() -> None:
    llm = drafting_llm()
    wish = {"method": "draft", "model": "same"} | FIXED
    watch = Watch(llm, wish)
    llm.generate([PROMPT], params("greedy"), speculation=wish)
    cache = watch.drafter.model._cache
    before = cache.hits
    llm.generate([PROMPT], params("seeded"), speculation=wish)
    assert cache.hits - before == (len(PROMPT) // 8) * 8


def test_a_draft_stops_where_the_model_doubts() -> None:
    llm = drafting_llm()
    depths = []
    for confidence in (0.0, 0.9, 1.0):
        wish = {"method": "exit", "layers": 3, "min_confidence": confidence} | FIXED
        watch = Watch(llm, wish)
        llm.generate([PROMPT], params("greedy", max_tokens=40), speculation=wish)
        trees = [tree for _, tree in watch.proposals if tree is not None]
        depths.append(float(np.mean([len(tree) for tree in trees])))
        for tree in trees:
            assert all(score >= confidence for score in (tree.scores or [])[:-1])
    assert 4.0 >= depths[0] > depths[1] >= depths[2] == 1.0


# ---------------------------------------------------------------- drafters for drafters


@pairwise(small={"right": {"method": "draft", "model": "other", "branches": [1]}, "wrong": {"method": "skip"},
                 "ngram": "ngram", "tree": {"method": "exit", "layers": 2, "branches": [2, 2]}},
          by={"own cache": {"method": "draft", "model": "other"}, "target's cache": {"method": "exit", "layers": 3}},
          verify=["coupled", "rejection"])
def test_a_cascade_passes_up_what_the_middle_model_would_have_drafted(verify: str, by: Any, small: Any) -> None:
    llm = drafting_llm()
    drafts = []
    for wish in (by, {"method": "cascade", "drafter": small, "by": by, "small_k": 3}):
        full = wish | {"k": 6, "adaptive": False, "verify": verify}
        watch = Watch(llm, full)
        out = llm.generate([PROMPT], params("seeded"), speculation=full)[0]
        assert out.speculation.failure is None
        drafts.append(watch.proposals)
        if verify == "coupled":
            assert out.outputs[0].token_ids == plain(FAST, "seeded")
    assert len(drafts[0]) == len(drafts[1])
    for (tokens, alone), (same_tokens, cascaded) in zip(*drafts):
        assert tokens == same_tokens and (alone is None) == (cascaded is None)
        if alone is not None and cascaded is not None:
            assert alone.tokens == cascaded.tokens and cascaded.is_chain
            assert (alone.q is None) == (cascaded.q is None) == (verify == "coupled")
            for one, other in zip(alone.q or (), cascaded.q or ()):
                assert np.array_equal(one, other)


def test_a_right_small_drafter_saves_the_middle_model_passes() -> None:
    llm = drafting_llm()
    passes = []
    for small in ("same", "other"):
        wish = {"method": "cascade", "drafter": {"method": "draft", "model": small, "branches": [1]},
                "by": {"method": "draft", "model": "same"}, "k": 8, "small_k": 7, "adaptive": False}
        watch = Watch(llm, wish)
        guess, calls = watch.drafter._guess, itertools.count()

        def counted(chains: Any, guess: Any = guess, calls: Any = calls) -> None:
            next(calls)
            guess(chains)

        watch.drafter._guess = counted
        llm.generate([PROMPT], params("greedy"), speculation=wish)
        passes.append(next(calls) / len(watch.proposals))
    assert passes[0] == 1.0 and passes[1] > 5.0, "a round is one pass of the middle model"


# ---------------------------------------------------------------- bad wishes, at the door, each alone


@pytest.mark.parametrize("wish, reason", [
    ({"method": "draft"}, "needs 'model'"),
    ({"method": "draft", "model": "same", "cache_tokens": 0}, "cache_tokens"),
    ({"method": "draft", "model": "same", "branches": 0}, "branches"),
    ({"method": "draft", "model": "same", "branches": []}, "branches"),
    ({"method": "draft", "model": "same", "branches": [2, "3"]}, "branches"),
    ({"method": "draft", "model": "same", "min_confidence": 1.5}, "min_confidence"),
    ({"method": "draft", "model": "same", "layers": 2}, "layers"),
    ({"method": "skip", "skip": []}, "skip"),
    ({"method": "skip", "skip": [4]}, "layers 0 to 3"),
    ({"method": "skip", "skip": ["attn.9"]}, "layers 0 to 3"),
    ({"method": "skip", "skip": ["head.1"]}, "head.1"),
    ({"method": "skip", "skip": [True]}, "True"),
    ({"method": "skip", "skip": [0, 1, 2, 3]}, "nothing"),
    ({"method": "exit", "layers": 0}, "from 1 to 3"),
    ({"method": "exit", "layers": 4}, "from 1 to 3"),
    ({"method": "precision", "bits": 3}, "8 or 4"),
    ({"method": "cascade", "drafter": "exit"}, "by"),
    ({"method": "cascade", "by": "exit"}, "drafter"),
    ({"method": "cascade", "drafter": "exit", "by": "ngram"}, "runs none"),
    ({"method": "cascade", "drafter": "exit", "by": {"method": "exit", "layers": 9}}, "from 1 to 3"),
    ({"method": "cascade", "drafter": "exit", "by": {"method": "exit", "verify": "coupled"}}, "as a whole"),
    ({"method": "cascade", "drafter": {"method": "exit", "verify": "coupled"}, "by": "exit"}, "as a whole"),
    ({"method": "cascade", "drafter": "ngram", "by": {"method": "exit", "branches": 2}}, "'branches'"),
    ({"method": "cascade", "drafter": "ngram", "by": {"method": "exit", "k": 2}}, "'k'"),
    ({"method": "cascade", "drafter": "ngram", "by": {"method": "exit", "min_confidence": 0.5}}, "'min_confidence'"),
    ({"method": "cascade", "drafter": ["ngram"], "by": "exit"}, "a method's name or a dict"),
    ({"method": "cascade", "drafter": {"method": "auto", "drafters": ["lookahead"]}, "by": "exit"},
     "cannot draft for a drafter"),
    ({"method": "cascade", "drafter": "lookahead", "by": "exit"}, "cannot draft for a drafter"),
    (functools.reduce(lambda wish, _: {"method": "cascade", "drafter": wish, "by": "exit"}, range(99), "exit"), "deep"),
])
def test_bad_wishes_are_refused_alone(wish: dict[str, Any], reason: str) -> None:
    llm = drafting_llm()
    good, bad = llm.generate([PROMPT, PROMPT], params("greedy"), speculation=[{"method": "exit"}, wish])
    assert good.error is None and good.outputs[0].token_ids == plain(FAST, "greedy")
    assert isinstance(bad.error, RequestError) and reason in str(bad.error)


def test_the_small_drafter_of_a_cascade_keeps_its_own_limits() -> None:
    llm = drafting_llm()
    watch = Watch(llm, {"method": "cascade", "drafter": {"method": "ngram", "k": 2, "nodes": 2}, "by": "exit", "k": 6,
                        "adaptive": False})
    small, budgets = watch.drafter._small, []
    propose = small.propose

    def watched(sequences: Any, given: Any) -> Any:
        budgets.extend(given)
        return propose(sequences, given)

    small.propose = watched
    out = llm.generate([PROMPT], params("greedy"), speculation={
        "method": "cascade", "drafter": {"method": "ngram", "k": 2, "nodes": 2}, "by": "exit", "k": 6,
        "adaptive": False})[0]
    assert out.outputs[0].token_ids == plain(FAST, "greedy")
    assert budgets and all(one.depth <= 2 and one.nodes == 2 for one in budgets)


@pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built here")
def test_what_the_native_decoder_cannot_do_is_refused() -> None:
    llm = drafting_llm("native")
    for wish, reason in (({"method": "skip", "skip": ["attn.1"]}, "whole layers"),
                         ({"method": "precision", "bits": 8}, "8 bits already")):
        with pytest.raises(RequestError, match=reason):
            llm.generate([PROMPT], params("greedy"), speculation=wish)
