"""Beam search: the texts, their order and their scores are transformers', whatever happens around the search."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
import transformers
from harness import DictWeights

from engine.test_equality_matrix import preempt_at, strangers
from engine.tiny import VOCAB, tiny_llm, tiny_model
from paceline import LLM, SamplingParams
from paceline.engine.core import Engine
from paceline.engine.records.record import Record
from paceline.engine.rows.placement import samples_on_device
from paceline.engine.schedule.sequence import Placement
from paceline.errors import RequestError
from paceline.models.config import ModelConfig
from paceline.models.registry import build
from paceline.request import RequestOutput

SMALL = 19
"""A vocabulary in which the tokens that end a text are among the likely ones now and then."""


@functools.cache
def pair(seed: int) -> tuple[Any, Any]:
    """A random model of transformers, and the same one here."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.25,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = build(ModelConfig.from_dict(config.to_dict()), DictWeights(dict(theirs.state_dict())), 128)
    return theirs, ours


def by_transformers(theirs: Any, prompt: list[int], width: int, n: int, stops: list[int], length: int,
                    **more: Any) -> list[tuple[list[int], float]]:
    found = theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
        num_return_sequences=n, do_sample=False, max_new_tokens=length, eos_token_id=stops or None,
        pad_token_id=SMALL + 7, output_scores=True, return_dict_in_generate=True, **more)
    texts = [[token for token in row[len(prompt):].tolist() if token != SMALL + 7] for row in found.sequences]
    return list(zip(texts, found.sequences_scores.tolist()))


def texts_of(out: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in out.outputs]


def beams(width: int, length: int, **more: Any) -> SamplingParams:
    return SamplingParams(beam_width=width, max_tokens=length, **more)


SEARCH = beams(4, 18, n=4, early_stopping="never", length_penalty=0.7, stop_token_ids=tuple(range(3, VOCAB, 8)))
CASES = list(itertools.product((2, 3, 4, 5), (-1.0, 0.0, 0.6, 1.0, 2.0), (False, True, "never")))


@pytest.mark.parametrize(("seed", "cases"), [(0, 14), (1, 14), *(
    pytest.param(seed, len(CASES), marks=pytest.mark.full) for seed in range(2, 10))])
def test_texts_order_and_scores_are_those_of_transformers(seed: int, cases: int) -> None:
    theirs, ours = pair(seed)
    llm = tiny_llm(ours, block_size=4)
    luck = random.Random(seed)
    early = 0
    for width, penalty, stopping in luck.sample(CASES, cases):
        prompt = luck.choices(range(SMALL), k=luck.randrange(1, 21))
        length, stops = luck.choice((2, 9, 14)), luck.choice(([], [3], [3, 11], [5, 8, 14]))
        more: dict[str, Any] = {"length_penalty": penalty, "early_stopping": stopping}
        want = by_transformers(theirs, prompt, width, width, stops, length, **more)
        out = llm.generate([prompt], SamplingParams(n=width, beam_width=width, max_tokens=length,
                                                    stop_token_ids=tuple(stops), **more))[0]
        assert texts_of(out) == [text for text, _ in want], (width, penalty, stopping, stops)
        # A negative penalty multiplies the sum by the length: into hundreds, where transformers' float32 is coarse.
        scores = pytest.approx([score for _, score in want], abs=1e-4, rel=1e-6)
        assert [completion.score for completion in out.outputs] == scores
        for completion in out.outputs:
            assert completion.score == completion.cumulative_logprob / len(completion.token_ids) ** penalty
            ended = completion.token_ids[-1] in stops
            assert completion.finish_reason == ("stop" if ended else "length")
            early += ended and len(completion.token_ids) < length
        llm.engine.cache.check([])
    assert early > 10, "texts of other lengths have to compete"


def test_min_tokens_keeps_the_end_away_as_in_transformers() -> None:
    theirs, ours = pair(1)
    for prompt in ([4, 7, 1], [9] * 6):
        want = by_transformers(theirs, prompt, 4, 4, [3, 11], 12, min_new_tokens=6)
        out = tiny_llm(ours).generate([prompt], beams(4, 12, n=4, min_tokens=6, stop_token_ids=(3, 11)))[0]
        assert texts_of(out) == [text for text, _ in want]
        assert min(map(len, texts_of(out))) > 6


def test_beams_that_a_small_vocabulary_cannot_fill_rest_until_it_can() -> None:
    """Of seven tokens four end a text: after the first step three beams go on, after the second all five."""
    llm = tiny_llm(tiny_model(vocab_size=7), block_size=2)
    running: list[int] = []
    out = run(llm, [1, 2, 3], beams(5, 6, n=5, stop_token_ids=(0, 2, 4, 6), early_stopping="never"),
              lambda engine: running.append(len(engine.scheduler.running))).snapshot()
    assert running[:2] == [3, 5] and running[-1] == 0
    texts = texts_of(out)
    assert len({tuple(text) for text in texts}) == 5
    assert [one.score for one in out.outputs] == sorted((one.score for one in out.outputs), reverse=True)


def test_fewer_results_than_beams_are_the_best_of_them() -> None:
    llm = tiny_llm()
    prompt = [5, 6, 7]
    every = texts_of(llm.generate([prompt], beams(4, 8, n=4))[0])
    assert texts_of(llm.generate([prompt], beams(4, 8))[0]) == every[:1]
    assert texts_of(llm.generate([prompt], beams(4, 8, n=3))[0]) == every[:3]


def test_logprobs_of_a_beam_are_those_of_its_tokens() -> None:
    llm = tiny_llm()
    out = llm.generate([[5, 6, 7]], beams(3, 6, n=3, logprobs=2, prompt_logprobs=0))[0]
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 3
    for completion in out.outputs:
        told = completion.logprobs or []
        check = llm.generate([[5, 6, 7, *completion.token_ids]], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
        want = (check.prompt_logprobs or [])[3:]
        assert [score.token for score in told] == completion.token_ids
        assert told == want
        assert completion.cumulative_logprob == sum(score.raw for score in told)


def test_equally_likely_texts_go_to_the_better_beam_and_the_lower_token() -> None:
    model = tiny_model()
    for name, tensor in vars(model).items():
        if isinstance(tensor, torch.Tensor) and name in ("embedding", "head"):
            tensor.zero_()
    llm = tiny_llm(model)
    assert llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=3))[0].outputs[0].token_ids == [0, 0, 0], \
        "this model must find all tokens alike"
    assert texts_of(llm.generate([[1]], beams(3, 2, n=3))[0]) == [[0, 0], [0, 1], [0, 2]]


# ------------------------------------------------------------------------------------- blocks

def check(engine: Engine) -> None:
    """Every block is where the sequences say, on the device and on the host."""
    everyone = [seq for sequences in engine.scheduler._requests.values() for seq in sequences]
    engine.cache.check([seq.allocation for seq in everyone if seq.seated],
                       [seq.swapped for seq in everyone if seq.swapped is not None])


def run(llm: LLM, prompt: list[int], params: SamplingParams, watch: Any) -> Record:
    engine = llm.engine
    name = engine.add(prompt, params)
    record = engine.record(name)
    while record.open:
        engine.step()
        watch(engine)
        check(engine)
    return engine.take(name)


@pytest.mark.parametrize("caching", [True, False])
def test_beams_share_what_they_have_in_common_and_copy_one_block_each_at_most(caching: bool) -> None:
    width, size = 5, 8
    llm = tiny_llm(block_size=size, enable_prefix_caching=caching)
    copies: list[int] = []
    apply = llm.engine.runner.storage.apply
    llm.engine.runner.storage.apply = lambda moves, block_copies: (  # type: ignore[method-assign]
        copies.append(len(block_copies)), apply(moves, block_copies))[1]
    used: list[int] = []

    def watch(engine: Any) -> None:
        running = engine.scheduler.running
        assert len(running) in (0, width)
        used.append(engine.cache.usage().used)
        for seq in running:
            assert seq.computed == len(seq.tokens) - 1

    prompt = [(i * 5 + 3) % VOCAB for i in range(61)]
    run(llm, prompt, beams(width, 30), watch)
    assert sum(copies) > 5, "beams part ways again and again"
    assert max(copies) <= width - 1, "the last holder of a block writes where it is"
    assert max(used) < len(prompt) // size + width * 5, "the prompt is there once"
    assert used[-1] == 0, "nothing is left behind"


@pytest.mark.parametrize("end", ["cancelled", "timeout", "error"])
def test_a_search_that_is_cut_short_leaves_nothing_behind(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    llm = tiny_llm()
    engine = llm.engine
    engine.clock = engine.scheduler.clock = lambda: now[0]  # type: ignore[assignment]
    name = engine.add([1, 2, 3], beams(3, 20, timeout_s=5.0))
    other = engine.add([4, 5], SamplingParams(max_tokens=30, temperature=0.0))
    for _ in range(6):
        engine.step()
    if end == "cancelled":
        engine.cancel(name)
    elif end == "timeout":
        now[0] = 6.0
    else:
        def broken(*_: Any) -> Any:
            raise RequestError("the logits are odd")

        monkeypatch.setattr("paceline.engine.decide.beams.best_tokens", broken)
    engine.step()
    out = engine.take(name).snapshot()
    assert out.finished and [completion.finish_reason for completion in out.outputs] == [end]
    assert (out.error is not None) == (end == "error")
    while engine.has_work:
        engine.step()
    assert len(engine.take(other).emitters[0].token_ids) == 30
    engine.cache.check([])
    assert engine.cache.usage().used == 0


# ------------------------------------------------------------------------------------- the equality matrix

PROMPT = [(i * 31 + 7) % VOCAB for i in range(41)]
CELLS: dict[str, dict[str, Any]] = {
    "in a batch": {"batch": 7},
    "in a batch, ahead": {"batch": 7, "schedule_ahead": True},
    "a step a few rows": {"batch": 4, "max_batch_tokens": 3},
    "chunks of 7, ahead": {"batch": 3, "max_prefill_chunk": 7, "schedule_ahead": True},
    "warm": {"warm": True},
    "warm in a batch": {"warm": True, "batch": 5},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"preempt": True},
    "preempted in a batch, ahead": {"preempt": True, "batch": 6, "schedule_ahead": True},
    "crowded": {"crowded": True, "batch": 8},
    "crowded, ahead": {"crowded": True, "batch": 8, "schedule_ahead": True},
    "crowded, swapped": {"crowded": True, "batch": 8, "preemption": "swap", "swap_space": 0.01},
    "crowded, swapped, ahead": {"crowded": True, "batch": 8, "preemption": "swap", "swap_space": 0.01,
                                "schedule_ahead": True},
    "crowded, computed again": {"crowded": True, "batch": 8, "preemption": "recompute"},
    "a block more than one beam needs": {"kv_blocks": 9, "max_model_len": 64, "watermark": 0.0, "scarce": True},
    "room for one beam only": {"kv_blocks": 8, "max_model_len": 64, "watermark": 0.0, "scarce": True,
                          "enable_prefix_caching": False},
    "room for one beam only, swapped": {"kv_blocks": 8, "max_model_len": 64, "watermark": 0.0, "scarce": True,
                                        "preemption": "swap", "swap_space": 0.01},
    "four beams on four seats": {"max_num_seqs": 4, "batch": 5},
}


def outcome(out: RequestOutput) -> list[tuple[list[int], float | None, str | None]]:
    assert out.error is None
    return [(one.token_ids, one.score, one.finish_reason) for one in out.outputs]


@functools.cache
def subject(name: str) -> tuple[Any, Any]:
    """A model, and what a search finds with it when it is alone."""
    model = tiny_model(name)
    found = outcome(tiny_llm(model, enable_prefix_caching=False).generate([PROMPT], SEARCH)[0])
    assert len({len(tokens) for tokens, *_ in found}) > 1, "texts of several lengths should compete"
    return model, found


@pytest.mark.parametrize(("name", "cell"), [
    pytest.param(name, cell, marks=() if name == ("llama", "qwen2")[place % 2] else pytest.mark.full)
    for place, cell in enumerate(CELLS) for name in ("llama", "qwen2", "mistral", "mixtral")])
def test_a_search_finds_the_same_whatever_happens_around_it(name: str, cell: str) -> None:
    model, expected = subject(name)
    options = dict(CELLS[cell])
    batch, warm = options.pop("batch", 1), options.pop("warm", False)
    crowded, preempt, scarce = (options.pop(key, False) for key in ("crowded", "preempt", "scarce"))
    if crowded:
        options |= {"kv_blocks": 18, "max_model_len": 90, "watermark": 0.0}
    llm = tiny_llm(model, **options)
    if warm:
        llm.generate([PROMPT + [3]], SamplingParams(max_tokens=2, temperature=0.0))
        llm.engine._ids = itertools.count()
    prompts, wishes = strangers(batch - 1)
    place = min(2, batch - 1)
    prompts.insert(place, PROMPT)
    wishes.insert(place, SEARCH)
    if preempt:
        preempt_at(llm, place, steps=(1, 2, 5, 9))
    outs = llm.generate(prompts, wishes)
    assert outcome(outs[place]) == expected
    assert all(out.error is None for out in outs)
    scarce = scarce and name != "mistral"  # whose window lets go of blocks: more beams fit
    assert outs[place].metrics.preemptions >= (4 if preempt else 1 if scarce else 0)
    assert not crowded or llm.engine.metrics.preemptions > 0
    assert not warm or outs[place].metrics.cached_tokens > 0
    llm.engine.cache.check([])
    assert llm.engine.cache.usage().used == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 30))])
def test_searches_come_and_go_in_a_crowd(seed: int) -> None:
    """Many at once, some cancelled, in a cache that holds few of them, with blocks swapped or computed again."""
    luck = random.Random(seed)
    model = tiny_model("llama", num_hidden_layers=1)
    llm = tiny_llm(model, kv_blocks=luck.randrange(9, 24), max_model_len=64, watermark=0.0, max_num_seqs=5,
                   max_batch_tokens=luck.choice((3, 8, 64)), schedule_ahead=luck.random() < 0.5,
                   enable_prefix_caching=luck.random() < 0.7, preemption=luck.choice(("recompute", "swap", "auto")))
    engine = llm.engine
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    ended: dict[str, RequestOutput] = {}
    for _ in range(400):
        if len(asked) < 12 and luck.random() < 0.3:
            prompt, width = PROMPT[:luck.randrange(1, 41)], luck.randrange(1, 6)
            wish = SamplingParams(beam_width=width, n=luck.randrange(1, width + 1), max_tokens=luck.randrange(1, 14),
                                  temperature=0.0, priority=luck.randrange(2), stop_token_ids=SEARCH.stop_token_ids)
            asked[engine.add(prompt, wish)] = (prompt, wish)
        for record in engine.step():
            if not record.open:
                ended[record.request.id] = engine.take(record.request.id).snapshot()
        check(engine)
        running = set(asked) - set(ended)
        if running and luck.random() < 0.02:
            name = luck.choice(sorted(running))
            engine.cancel(name)
            engine.take(name)
            del asked[name]
        if len(asked) >= 12 and not engine.has_work:
            break
    assert set(ended) == set(asked), "nobody waits for ever"
    assert engine.cache.usage().used == 0
    alone = tiny_llm(model)
    for name, (prompt, wish) in asked.items():
        assert outcome(ended[name]) == outcome(alone.generate([prompt], wish)[0])


def test_searches_side_by_side_are_those_of_each_alone() -> None:
    llm = tiny_llm(max_num_seqs=6)
    prompts = [PROMPT[:7 * i + 1] for i in range(5)]
    wishes = [beams(2 + i % 3, 10, n=2, length_penalty=0.5 * i, early_stopping=(True, False, "never")[i % 3],
                    stop_token_ids=(3, 17, 40)) for i in range(5)]
    together = [outcome(out) for out in llm.generate(prompts, wishes)]
    assert together == [outcome(tiny_llm().generate([prompt], wish)[0]) for prompt, wish in zip(prompts, wishes)]
    llm.engine.cache.check([])


# ------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize(("wish", "param"), [
    ({"beam_width": 0}, "beam_width"), ({"beam_width": 1 << 20}, "beam_width"), ({"beam_width": 2.0}, "beam_width"),
    ({"n": 5}, "n"), ({"temperature": 0.7}, "temperature"), ({"top_k": 4}, "top_k"), ({"top_p": 0.5}, "top_p"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"), ({"presence_penalty": 1.0}, "presence_penalty"),
    ({"logit_bias": {3: 1.0}}, "logit_bias"), ({"bad_words": ["a"]}, "bad_words"), ({"regex": "a*"}, "regex"),
    ({"json_schema": True}, "json_schema"), ({"stop": ["."]}, "stop"), ({"best_of": 6}, "best_of"),
    ({"trace": True}, "trace"), ({"allowed_token_ids": [1]}, "allowed_token_ids"), ({"interrupt": print}, "interrupt"),
    ({"length_penalty": float("nan")}, "length_penalty"), ({"length_penalty": 1e6}, "length_penalty"),
    ({"early_stopping": "always"}, "early_stopping"), ({"early_stopping": 1}, "early_stopping"),
    ({"max_tokens": 0, "prompt_logprobs": 0}, "max_tokens"),
    ({"beam_width": 1, "length_penalty": 2.0}, "length_penalty"),
    ({"beam_width": 1, "early_stopping": True}, "early_stopping"),
])
def test_what_a_search_cannot_have_is_refused_by_name(wish: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**({"beam_width": 4} | wish))
    assert caught.value.param == param


def test_more_beams_than_seats_and_speculation_are_refused_alone() -> None:
    llm = tiny_llm(max_num_seqs=8)
    plain = SamplingParams(max_tokens=3, temperature=0.0)
    outs = llm.generate([[1], [2], [3], [4]], [plain, beams(9, 3), beams(2, 3), beams(2, 3)],
                        speculation=[None, None, "ngram", ...])
    assert [out.error is None for out in outs] == [True, False, False, True]
    assert [out.error.param for out in outs if isinstance(out.error, RequestError)] == ["beam_width", "speculation"]


@pytest.mark.parametrize("wish", [{"beam_width": 2}, {"best_of": 2}])
def test_a_device_never_runs_ahead_of_what_the_host_decides(wish: dict[str, Any]) -> None:
    engine = tiny_llm().engine
    engine.add([1, 2], SamplingParams(**wish))
    engine.add([1, 2], SamplingParams())
    engine.step()
    held = [(seq.placement is Placement.FREE, samples_on_device(seq)) for seq in engine.scheduler.running]
    assert held == [(False, False)] * 2 + [(True, True)]


def test_the_engines_own_speculation_leaves_searches_alone() -> None:
    llm = tiny_llm(speculation="ngram")
    out = llm.generate([PROMPT], SEARCH)[0]
    assert outcome(out) == outcome(tiny_llm().generate([PROMPT], SEARCH)[0])
    assert out.speculation is None


@pytest.mark.parametrize("wish", [{"beam_width": 2}, {"best_of": 2}])
def test_nothing_is_streamed_that_is_chosen_at_the_end(wish: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be streamed"):
        next(tiny_llm().stream([1, 2], SamplingParams(**wish)))
