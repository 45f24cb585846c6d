"""Embeddings: a prompt's last hidden states as one vector, the same to the bit whoever else is served and however."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.test_hidden_states import NATIVE, hidden_of
from engine.tiny import VOCAB, tiny_llm, tiny_model
from engine.whole import check_at_rest
from paceline import LLM, SamplingParams
from paceline.errors import RequestError
from speculation.model_drafting import target

PROMPT = [(i * 31 + 7) % VOCAB for i in range(45)]
OTHERS = [[(i * 17 + n) % VOCAB for i in range(30 + n)] for n in range(3)]
TALK = SamplingParams(max_tokens=12, temperature=0.0)


def asked(pooling: str) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=pooling)


def embedded(llm: LLM, pooling: str, prompt: list[int] = PROMPT) -> list[float]:
    found = llm.generate([prompt], asked(pooling))[0].embedding
    assert found is not None
    return found


def expected(llm: LLM, pooling: str) -> list[float]:
    """By one pass over all of the prompt."""
    last = llm.engine.model.config.num_layers
    rows = llm.engine.kernels.norm(hidden_of(llm, PROMPT, (last,))[last], llm.engine.model.norm).double().numpy()
    rows = rows if pooling == "mean" else rows[-1:]
    total = np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return (total / np.sqrt(np.square(total).sum())).astype(np.float32).tolist()


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("kind", ["reference", "stepped", pytest.param("native", marks=NATIVE)])
def test_neither_company_nor_chunks_nor_the_cache_change_it(kind: str, pooling: str) -> None:
    model = target("native") if kind == "native" else tiny_model()
    more: dict[str, Any] = {} if kind == "native" else {"kernels": kind}
    # The reference has the bits of both that run in torch.
    plain = {} if kind == "native" else {"kernels": "reference"}
    want = expected(tiny_llm(model, enable_prefix_caching=False, **plain), pooling)
    assert abs(sum(value * value for value in want) - 1.0) < 1e-6
    llm = tiny_llm(model, **more)
    assert embedded(llm, pooling) == want, "alone"
    assert embedded(llm, pooling) == want, "with all of it in the cache"
    for chunk in (1, 7):
        chunked = tiny_llm(model, max_prefill_chunk=chunk, **more)
        texts = [out.outputs[0].token_ids for out in chunked.generate(OTHERS, TALK)]
        outs = chunked.generate([*OTHERS, PROMPT, PROMPT], [TALK] * 3 + [asked(pooling)] * 2)
        assert outs[3].embedding == outs[4].embedding == want, "in chunks, among others"
        assert [out.outputs[0].token_ids for out in outs[:3]] == texts, "who are not changed by it"
        assert outs[0].embedding is None and outs[3].outputs[0].token_ids == []
        assert outs[3].outputs[0].finish_reason == "length"
        check_at_rest(chunked.engine)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_one_is_the_same(preemption: str) -> None:
    model = tiny_model()
    want = expected(tiny_llm(model, enable_prefix_caching=False), "mean")
    llm = tiny_llm(model, kv_blocks=13, max_prefill_chunk=4, preemption=preemption)
    first = llm.engine.add(PROMPT, SamplingParams(max_tokens=0, pooling="mean", priority=-1))
    for _ in range(3):
        llm.engine.step()
    llm.engine.add(PROMPT[::-1] + PROMPT, SamplingParams(max_tokens=8, temperature=0.0))
    record = llm.engine.record(first)
    while record.open:
        llm.engine.step()
    assert record.metrics.preemptions and record.snapshot().embedding == want


def test_every_architecture_has_them() -> None:
    for name in ("gemma2", "gpt2", "mixtral", "deepseek_v2", "olmo2"):
        llm = tiny_llm(tiny_model(name))
        one, other = (torch.tensor(embedded(llm, "mean", prompt)) for prompt in (PROMPT, OTHERS[0]))
        assert torch.isfinite(one).all() and abs(float(one @ one) - 1) < 1e-5
        assert float(one @ other) < 0.9999, name


def test_a_model_without_hidden_states_says_so() -> None:
    model = tiny_model()
    del model.norm
    with pytest.raises(RequestError, match="no hidden states"):
        tiny_llm(model).generate([PROMPT], asked("mean"))


def test_what_makes_no_sense_is_refused() -> None:
    for more in ({"pooling": "max"}, {"pooling": "mean", "max_tokens": 3}, {"pooling": "mean", "n": 2}):
        with pytest.raises(RequestError, match="pooling"):
            SamplingParams(**{"max_tokens": 0} | more)
