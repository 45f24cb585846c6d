"""best_of: more samples are drawn than returned, and the likeliest by token are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.tiny import tiny_engine, tiny_llm
from paceline import AsyncLLM, SamplingParams
from paceline.errors import RequestError
from paceline.sampling.noise import sample_seed

PROMPT = [(i * 5 + 3) % 97 for i in range(29)]
ENDS = tuple(range(0, 97, 9))


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "seed": 7, "stop_token_ids": ENDS} | more))


@pytest.mark.parametrize("speculation", [None, {"method": "ngram"}])
@pytest.mark.parametrize("n", [1, 3])
def test_the_likeliest_samples_by_token_come_first(n: int, speculation: Any) -> None:
    llm = tiny_llm()
    every = llm.generate([PROMPT], params(n=6, logprobs=0))[0].outputs
    assert len({len(one.token_ids) for one in every}) > 2, "samples of several lengths should compete"
    mean = {one.seed: sum(score.raw for score in one.logprobs or []) / len(one.token_ids) for one in every}
    want = sorted(every, key=lambda one: -mean[one.seed])[:n]
    assert [one.index for one in want] != list(range(n))
    out = llm.generate([PROMPT], params(n=n, best_of=6), speculation=speculation)[0]
    assert [one.index for one in out.outputs] == list(range(n))
    assert [one.token_ids for one in out.outputs] == [one.token_ids for one in want]
    assert [one.seed for one in out.outputs] == [one.seed for one in want]
    assert [one.score for one in out.outputs] == pytest.approx([mean[one.seed] for one in want], abs=1e-9)
    assert all(one.logprobs is None for one in out.outputs)
    assert out.metrics.output_tokens == sum(len(one.token_ids) for one in every), "all samples count"
    llm.engine.cache.check([])


def test_as_many_as_are_returned_are_just_samples() -> None:
    llm = tiny_llm()
    plain, chosen = llm.generate([PROMPT] * 2, [params(n=3), params(n=3, best_of=3)])
    assert [one.token_ids for one in chosen.outputs] == [one.token_ids for one in plain.outputs]
    assert [one.seed for one in chosen.outputs] == [sample_seed(7, i) for i in range(3)]
    assert [one.score for one in chosen.outputs] == [None] * 3


def test_equally_likely_samples_come_in_their_order() -> None:
    out = tiny_llm().generate([PROMPT], params(n=2, best_of=4, temperature=0.0))[0]
    assert [one.seed for one in out.outputs] == [sample_seed(7, i) for i in range(2)]


@pytest.mark.parametrize(("wish", "param"), [
    ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 0}, "best_of"), ({"best_of": 10_000}, "best_of"),
    ({"best_of": 2.5}, "best_of"), ({"best_of": 3, "trace": True}, "trace"),
])
def test_what_cannot_be_is_refused_by_name(wish: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=param) as caught:
        SamplingParams(**wish)
    assert caught.value.param == param


@pytest.mark.parametrize("wish", [{"best_of": 3}, {"beam_width": 3}])
def test_told_once_and_whole_by_async_llm(wish: dict[str, Any]) -> None:
    want = tiny_llm().generate([PROMPT], SamplingParams(max_tokens=6, seed=7, **wish))[0].outputs[0].token_ids

    async def ask() -> None:
        llm = AsyncLLM(engine=tiny_engine())
        try:
            asked = SamplingParams(max_tokens=6, seed=7, **wish)
            heard = [out async for out in llm.generate(PROMPT, asked)]
            assert [[one.token_ids for one in out.outputs] for out in heard] == [[want]]
            assert (await llm.complete(PROMPT, asked)).outputs[0].token_ids == want
            with pytest.raises(RequestError, match="cannot be streamed"):
                await llm.stream(PROMPT, asked)
            assert llm.live == 0
        finally:
            llm.close()

    asyncio.run(ask())


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_of_samples_that_did_not_all_end_none_is_the_best(reason: str) -> None:
    engine = tiny_engine()
    name = engine.add([1, 2, 3], SamplingParams(best_of=3, n=2, max_tokens=60, seed=0, temperature=1.0,
                                                stop_token_ids=tuple(range(12))))
    while engine.record(name).open == 3:
        engine.step()
    engine.cancel(name, reason)
    outputs = engine.take(name).snapshot().outputs
    assert [(one.index, one.text, one.token_ids, one.finish_reason) for one in outputs] == [
        (0, "", [], reason), (1, "", [], reason)]
