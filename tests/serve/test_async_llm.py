"""AsyncLLM as the server uses it: deltas that add up, results, questions to the engine, an engine that dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.tiny import tiny_engine, tiny_llm
from paceline import AsyncLLM, SamplingParams
from paceline.bench.null_model import byte_tokenizer
from paceline.errands import Errand
from paceline.errors import PacelineError, RequestError

PROMPT = [5, 6, 7, 8] * 6
PARAMS = SamplingParams(max_tokens=40, temperature=0.9, seed=3, n=2, logprobs=1)


def in_time(scene: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scene, 60)

    return asyncio.run(bounded())


def build() -> AsyncLLM:
    return AsyncLLM(engine=tiny_engine(tokenizer=byte_tokenizer()))


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "k": 4, "adaptive": False}])
def test_deltas_add_up_to_the_output(speculation: Any) -> None:
    async def scene() -> None:
        llm = build()
        listener = await llm.stream(PROMPT, PARAMS, speculation=speculation)
        texts, tokens, scores, origins, reasons = ["", ""], [[], []], [[], []], [], [None, None]
        output = None
        async for delta in listener:
            assert output is None, "nothing comes after the end"
            for sample in delta.samples:
                assert reasons[sample.index] is None, "nothing comes of a sample after its end"
                texts[sample.index] += sample.text
                tokens[sample.index] += sample.token_ids
                scores[sample.index] += sample.logprobs or []
                origins += sample.origins or []
                reasons[sample.index] = sample.finish_reason
            output = delta.output
        assert output is not None and output.finished
        assert texts == [sample.text for sample in output.outputs]
        assert tokens == [sample.token_ids for sample in output.outputs]
        assert scores == [sample.logprobs for sample in output.outputs]
        assert reasons == ["length", "length"]
        assert origins == ([] if speculation is None else output.speculation.provenance[:40])
        assert llm.live == 0
        llm.close()

    in_time(scene())


def test_complete_gives_what_generate_gives_offline() -> None:
    want = tiny_llm(tokenizer=byte_tokenizer()).generate(PROMPT, PARAMS)[0]

    async def scene() -> None:
        llm = build()
        outs = await asyncio.gather(*(llm.complete(PROMPT, PARAMS) for _ in range(5)))
        assert [[sample.token_ids for sample in out.outputs] for out in outs] == [
            [sample.token_ids for sample in want.outputs]] * 5
        with pytest.raises(RequestError):
            await llm.complete([], PARAMS)
        llm.close()

    in_time(scene())


def test_questions_are_put_between_steps_and_may_fail() -> None:
    async def scene() -> None:
        llm = build()
        listener = await llm.stream(PROMPT, SamplingParams(max_tokens=400))
        assert await llm.ask(lambda engine: engine.report()["running"] + engine.report()["waiting"]) == 1
        with pytest.raises(ZeroDivisionError):
            await llm.ask(lambda engine: 1 / 0)
        assert llm.live == 1 and llm.alive
        listener.close()
        listener.close()
        assert await llm.ask(lambda engine: engine.cache.usage().used) == 0
        assert llm.live == 0
        llm.close()
        assert not llm.alive
        with pytest.raises(RequestError, match="closed"):
            await llm.ask(lambda engine: 1)

    in_time(scene())


def test_metrics_may_be_read_from_any_thread_while_the_engine_runs() -> None:
    async def scene() -> None:
        llm = build()
        where: list[threading.Thread] = []
        report = llm.engine.report
        llm.engine.report = lambda: where.append(threading.current_thread()) or report()  # type: ignore[method-assign]
        listener = await llm.stream(PROMPT, SamplingParams(max_tokens=400))
        told = await asyncio.gather(*(asyncio.to_thread(llm.metrics) for _ in range(8)))
        told.append(llm.metrics())
        assert [one["requests"] for one in told] == [1] * 9
        assert {thread.name for thread in where} == {"paceline-engine"}, "between two steps, where the state is whole"
        listener.close()
        llm.close()
        assert llm.metrics()["running"] == 0, "and when it is closed"

    in_time(scene())


def test_cancel_all_ends_every_request_and_tells() -> None:
    async def scene() -> None:
        llm = build()
        tasks = [asyncio.ensure_future(llm.complete(PROMPT, SamplingParams(max_tokens=480))) for _ in range(3)]
        while llm.live < 3:
            await asyncio.sleep(0.001)
        llm.cancel_all()
        outs = await asyncio.gather(*tasks)
        assert {out.outputs[0].finish_reason for out in outs} <= {"cancelled", "length"}
        assert "cancelled" in {out.outputs[0].finish_reason for out in outs}
        assert await llm.ask(lambda engine: engine.cache.usage().used) == 0
        llm.close()

    in_time(scene())


def test_an_engine_that_dies_is_told_to_all_who_wait() -> None:
    async def scene() -> None:
        llm = build()
        first = await llm.stream(PROMPT, SamplingParams(max_tokens=480))

        def broken() -> Any:
            raise RuntimeError("the card fell off")

        await llm.ask(lambda engine: setattr(engine, "step", broken))
        with pytest.raises(PacelineError, match="the card fell off"):
            async for _ in first:
                pass
        while llm.alive:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="closed"):
            await llm.complete(PROMPT, PARAMS)
        first.close()

    in_time(scene())


class Panic(BaseException):
    """Native code that panics raises no Exception."""


def test_a_panic_in_a_step_is_told_to_all_who_wait() -> None:
    async def scene() -> None:
        llm = build()
        first = await llm.stream(PROMPT, SamplingParams(max_tokens=480))

        def broken() -> Any:
            raise Panic("index out of bounds")

        await llm.ask(lambda engine: setattr(engine, "step", broken))
        with pytest.raises(PacelineError, match="index out of bounds"):
            async for _ in first:
                pass

    in_time(scene())


@pytest.mark.parametrize("kind", [Panic, StopIteration, SystemExit])
def test_a_question_that_panics_is_answered_with_an_error(kind: type[BaseException]) -> None:
    async def scene() -> None:
        llm = build()

        def panic(engine: Any) -> None:
            raise kind("index out of bounds")

        with pytest.raises(PacelineError, match="index out of bounds"):
            await llm.ask(panic)
        assert await llm.ask(lambda engine: 1) == 1
        llm.close()

    in_time(scene())


def test_questions_behind_an_errand_that_breaks_the_engine_are_failed() -> None:
    async def scene() -> None:
        llm = build()
        begun, posted = threading.Event(), threading.Event()

        def block(engine: Any) -> None:
            begun.set()
            assert posted.wait(60)

        first = asyncio.ensure_future(llm.ask(block))
        assert await asyncio.to_thread(begun.wait, 60)
        llm._post(Errand(lambda engine: 1 / 0))
        behind = asyncio.ensure_future(llm.ask(lambda engine: 1))
        await asyncio.sleep(0)
        posted.set()
        await first
        with pytest.raises(PacelineError, match="has ended"):
            await behind

    in_time(scene())
