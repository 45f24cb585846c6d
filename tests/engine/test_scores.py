"""Log-probabilities, prompt scores, traces and their replay."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.tiny import VOCAB, record, tiny_llm, tiny_model
from paceline import SamplingParams
from paceline.engine import core
from paceline.engine.replay import replay_on
from paceline.errors import StepError
from paceline.sampling.trace import Trace

PROMPT = [(i * 11 + 2) % VOCAB for i in range(40)]


def test_raw_logprobs_are_the_softmax_of_the_models_logits() -> None:
    llm = tiny_llm()
    pipeline = record(llm)
    out = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0.7, top_k=5, seed=3, logprobs=4))[0]
    completion = out.outputs[0]
    assert completion.logprobs is not None and len(completion.logprobs) == 8
    for token, score, logits in zip(completion.token_ids, completion.logprobs,
                                    pipeline.logits_of(3, len(PROMPT), completion.token_ids)):
        want = torch.log_softmax(logits.double(), -1)
        assert score.token == token
        assert score.raw == pytest.approx(want[token].item(), abs=1e-5)
        assert list(score.top) == want.topk(4).indices.tolist()
        assert list(score.top.values()) == pytest.approx(want.topk(4).values.tolist(), abs=1e-5)
        assert score.rank == 1 + int((logits > logits[token]).sum())
        assert score.rank <= 5 and score.processed <= 0


@pytest.mark.parametrize(("options", "logit_rows"), [
    ({}, 1000), ({"max_prefill_chunk": 7}, 1000), ({"max_prefill_chunk": 1}, 1000), ({}, 5)])
def test_prompt_logprobs_equal_those_of_decoding_the_same_text(options: dict[str, Any], logit_rows: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "LOGIT_BYTES", 4 * VOCAB * logit_rows)
    llm = tiny_llm(**options)
    assert llm.engine.scheduler.config.max_logit_rows == logit_rows
    first = llm.generate([PROMPT[:30]], SamplingParams(max_tokens=6, temperature=0.0, logprobs=2))[0].outputs[0]
    text = PROMPT[:30] + first.token_ids
    out = llm.generate([text], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert out.outputs[0].token_ids == [] and out.outputs[0].finish_reason == "length"
    scores = out.prompt_logprobs
    assert scores is not None and len(scores) == len(text) and scores[0] is None
    assert [s.token for s in scores[1:] if s is not None] == text[1:]
    assert first.logprobs is not None
    for decoded, scored in zip(first.logprobs, scores[30:]):
        assert scored is not None
        assert (scored.token, scored.raw, scored.rank, scored.top) == (
            decoded.token, decoded.raw, decoded.rank, decoded.top)


def test_prompt_logprobs_bypass_the_prefix_cache_and_go_on_to_the_answer() -> None:
    llm = tiny_llm()
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0))[0]
    out = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0))[0]
    assert out.metrics.cached_tokens == 0 and out.metrics.cache_miss == "prompt_logprobs"
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == len(PROMPT)


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    whole = tiny_llm().generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=1, n=2))[0]
    llm = tiny_llm(max_prefill_chunk=16)
    name = llm.engine.add(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1))
    llm.engine.step()
    llm.engine.scheduler.preempt(llm.engine.scheduler.running[0])
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.take(name).snapshot().prompt_logprobs == whole.prompt_logprobs


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt_logprobs": 1}, {"prompt_logprobs": 1, "n": 2}])
def test_nan_logits_fail_their_request_alone(more: dict[str, Any]) -> None:
    model = tiny_model()
    llm = tiny_llm(model)
    healthy = model.logits

    def sick_once(hidden: torch.Tensor, kernels: Any) -> torch.Tensor:
        out = healthy(hidden, kernels)
        out[0] = math.nan  # the first row belongs to the first request
        model.logits = healthy
        return out

    model.logits = sick_once
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    sick = SamplingParams(max_tokens=3, temperature=0.0, **more)
    outs = llm.generate([PROMPT, PROMPT[::-1]], [sick, greedy])
    assert isinstance(outs[0].error, StepError) and "NaN" in str(outs[0].error)
    assert {c.finish_reason for c in outs[0].outputs} == {"error"}
    assert outs[1].error is None
    assert outs[1].outputs[0].token_ids == tiny_llm().generate([PROMPT[::-1]], greedy)[0].outputs[0].token_ids
    assert llm.engine.cache.usage().used == 0


@pytest.mark.parametrize("style", [
    {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 12345},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {4: 2.0}, "stop_token_ids": [7], "n": 2},
])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_trace_replays(style: dict[str, Any], speculate: bool) -> None:
    llm = tiny_llm()
    script = llm.generate([PROMPT], SamplingParams(max_tokens=9, **({"seed": 5} | style)))[0].outputs[0].token_ids
    wish = {"method": "oracle", "tokens": script, "k": 3, "branches": 2} if speculate else None
    out = llm.generate([PROMPT], SamplingParams(max_tokens=9, trace=True, **({"seed": 5} | style)),
                       speculation=wish)[0]
    trace = Trace.from_json(out.trace.to_json())
    assert [entry.token for entry in trace.tokens] == out.outputs[0].token_ids == script
    assert [entry.position for entry in trace.tokens] == list(range(len(PROMPT), len(PROMPT) + len(script)))
    assert all(entry.raw_logprob <= 0 and entry.support >= 1 for entry in trace.tokens)
    if speculate:
        assert {entry.outcome for entry in trace.tokens} >= {"plain", "accepted"}
        assert {entry.drafter for entry in trace.tokens if entry.outcome == "accepted"} == {"oracle"}
    report = replay_on(tiny_llm().engine, trace)
    assert report.equal and report.same_model and report.first_difference is None
    trace.tokens[3].token = (trace.tokens[3].token + 1) % VOCAB
    broken = replay_on(tiny_llm().engine, trace)
    assert not broken.equal and broken.first_difference == 3


def test_samples_and_prompt_scores_in_one_step_read_their_own_rows() -> None:
    """Two samples of one request share a row; as many rows as samples in all must not hide that."""
    sampled = SamplingParams(max_tokens=3, temperature=0.0, n=2)
    scored = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    alone = [tiny_llm().generate([prompt], params)[0].outputs[0].token_ids
             for prompt, params in ((PROMPT, sampled), (PROMPT[5:7], scored))]
    outs = tiny_llm().generate([PROMPT, PROMPT[5:7]], [sampled, scored])
    assert [out.outputs[0].token_ids for out in outs] == alone
    assert outs[0].outputs[1].token_ids == alone[0]
