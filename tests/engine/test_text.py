"""From tokens to text: stops, hold-back, UTF-8, the interrupt hook, streaming."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from engine.tiny import tiny_engine, tiny_llm, tiny_model
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.bench.null_model import byte_tokenizer
from paceline.errors import PacelineError, RequestError
from paceline.models.chat import ChatTemplate
from paceline.models.forward import Forward
from paceline.models.interface import ModelTraits

TOKENIZER = byte_tokenizer()
SCRIPT = "héllo wörld, this is a text ✓ that stops somewhere 🙂 and ends."


class ScriptModel(ModelTraits):
    """Says SCRIPT byte by byte, whatever the prompt was: what is tested here is what happens after sampling."""

    def __init__(self) -> None:
        inner = tiny_model(vocab_size=256)
        self.config, self.cache_groups = inner.config, inner.cache_groups
        self.script = TOKENIZER.encode(SCRIPT)
        self.prompt_len = 4

    def forward(self, token_ids: torch.Tensor, context: Forward) -> torch.Tensor:
        return context.layout.positions[:, None].float()

    def logits(self, hidden: torch.Tensor, kernels: Any) -> torch.Tensor:
        out = torch.zeros(len(hidden), 256)
        for row, position in enumerate(hidden[:, 0].long().tolist()):
            out[row, self.script[(position + 1 - self.prompt_len) % len(self.script)]] = 30.0
        return out


@pytest.fixture
def llm() -> LLM:
    return LLM.from_engine(tiny_engine(ScriptModel(), TOKENIZER))


def answer(llm: LLM, **params: Any) -> Any:
    settings = {"max_tokens": 300, "temperature": 0.0} | params
    return llm.generate(["abcd"], SamplingParams(**settings))[0].outputs[0]


def test_length(llm: LLM) -> None:
    size = len(SCRIPT.encode())
    out = answer(llm, max_tokens=size)
    assert out.text == SCRIPT
    assert out.finish_reason == "length"


def test_a_cut_character_at_the_end_is_a_replacement_character(llm: LLM) -> None:
    assert answer(llm, max_tokens=2).text == "h�"


def test_a_stop_string_across_tokens_cuts_the_text_before_it(llm: LLM) -> None:
    out = answer(llm, stop=["text ✓", "never"])
    assert out.text == "héllo wörld, this is a "
    assert (out.finish_reason, out.stop_reason) == ("stop", "text ✓")
    assert TOKENIZER.decode(out.token_ids).endswith("text ✓")


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llm: LLM) -> None:
    comma = TOKENIZER.encode(",")[0]
    out = answer(llm, stop_token_ids=[comma])
    assert out.text == "héllo wörld"
    assert out.token_ids[-1] == comma
    assert (out.finish_reason, out.stop_reason) == ("stop", comma)


def test_min_tokens_bars_stop_tokens_and_stop_strings(llm: LLM) -> None:
    out = answer(llm, stop=["l"], min_tokens=10)
    assert out.text == "héllo wör"
    comma = TOKENIZER.encode(",")[0]
    barred = answer(llm, stop_token_ids=[comma], min_tokens=20, max_tokens=20)
    assert comma not in barred.token_ids[:19]


def test_the_interrupt_hook_ends_the_text(llm: LLM) -> None:
    out = answer(llm, interrupt=lambda text, ids: text.endswith("world") or len(ids) == 12)
    assert out.finish_reason == "interrupt"
    assert len(out.token_ids) == 12


def test_an_interrupt_hook_that_raises_fails_its_request_alone(llm: LLM) -> None:
    def broken(text: str, ids: list[int]) -> bool:
        raise ZeroDivisionError("oops")

    ok = SamplingParams(max_tokens=5, temperature=0.0)
    outs = llm.generate(["abcd", "abcd"], [SamplingParams(max_tokens=5, interrupt=broken), ok])
    assert isinstance(outs[0].error, RequestError) and "oops" in str(outs[0].error)
    assert outs[1].error is None and outs[1].outputs[0].finish_reason == "length"


def test_streamed_text_only_grows_and_is_never_broken(llm: LLM) -> None:
    size = len(SCRIPT.encode())
    texts = [out.outputs[0].text for out in llm.stream("abcd", SamplingParams(max_tokens=size, temperature=0.0))]
    assert texts[-1] == SCRIPT
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(texts))
    assert not any("�" in text for text in texts)


def test_a_stream_tells_how_much_of_the_prompt_is_read() -> None:
    llm = tiny_llm(max_batch_tokens=16)
    told: list[tuple[str, int, int | None]] = []
    before = [len(told) for _ in llm.stream([5] * 50, SamplingParams(max_tokens=3, temperature=0.0),
                                            progress=lambda *news: told.append(news))]
    assert [done for _, done, _ in told] == [16, 32, 48, 50] and {total for _, _, total in told} == {50}
    assert before == [4] * 3, "all of it before the first token, and nothing after"


def test_a_held_back_stop_prefix_is_not_streamed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=300, temperature=0.0, stop=["wörld, this"])
    texts = [out.outputs[0].text for out in llm.stream("abcd", params)]
    assert texts[-1] == "héllo "
    assert all("w" not in text for text in texts)


def test_leaving_a_stream_cancels_the_request(llm: LLM) -> None:
    for count, _ in enumerate(llm.stream("abcd", SamplingParams(max_tokens=300, temperature=0.0))):
        if count == 3:
            break
    assert not llm.engine.has_work
    llm.engine.cache.check([])


def test_two_streams_at_once(llm: LLM) -> None:
    first = llm.stream("abcd", SamplingParams(max_tokens=10, temperature=0.0))
    second = llm.stream("wxyz", SamplingParams(max_tokens=4, temperature=0.0))
    next(first)
    ends = [list(second)[-1].outputs[0].text, list(first)[-1].outputs[0].text]
    assert ends == ["hél", "héllo wö"]


def test_the_async_face_serves_many_and_cancels() -> None:
    async def scene() -> tuple[list[str], bool]:
        llm = AsyncLLM(engine=tiny_engine(ScriptModel(), TOKENIZER))

        async def ask(size: int) -> str:
            text = ""
            async for out in llm.generate("abcd", SamplingParams(max_tokens=size, temperature=0.0)):
                text = out.outputs[0].text
            return text

        async def leave() -> None:
            async for _ in llm.generate("abcd", SamplingParams(max_tokens=400, temperature=0.0)):
                return

        texts = await asyncio.gather(ask(6), ask(7), ask(13))
        await leave()
        with pytest.raises(RequestError):
            await ask(-0 or 0)
        for _ in range(200):
            if not llm.engine.has_work:
                break
            await asyncio.sleep(0.01)
        idle = not llm.engine.has_work
        llm.close()
        return list(texts), idle

    texts, idle = asyncio.run(scene())
    assert texts == ["héllo", "héllo ", "héllo wörld"]
    assert idle


def async_llm() -> AsyncLLM:
    return AsyncLLM(engine=tiny_engine(ScriptModel(), TOKENIZER))


async def listen(llm: AsyncLLM, **more: Any) -> Any:
    outs = [out async for out in llm.generate("abcd", SamplingParams(max_tokens=400, temperature=0.0), **more)]
    return outs[-1]


async def settled(condition: Callable[[], bool]) -> bool:
    for _ in range(500):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


def in_time(scene: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(scene, 30)

    return asyncio.run(bounded())


def test_closing_ends_the_requests_that_are_running() -> None:
    async def scene() -> None:
        llm = async_llm()
        task = asyncio.create_task(listen(llm))
        assert await settled(lambda: llm.engine.metrics.output_tokens > 2)
        llm.close()
        out = await task
        assert out.finished and out.outputs[0].finish_reason == "cancelled"
        assert llm.engine.cache.usage().used == 0
        with pytest.raises(RequestError, match="closed"):
            await listen(llm)

    in_time(scene())


def test_leaving_after_closing_is_no_error() -> None:
    async def scene() -> None:
        llm = async_llm()
        snapshots = llm.generate("abcd", SamplingParams(max_tokens=400, temperature=0.0))
        await anext(snapshots)
        llm.close()
        await snapshots.aclose()

    in_time(scene())


def test_a_task_cancelled_before_its_request_is_admitted_leaves_nothing_behind() -> None:
    async def scene() -> None:
        llm = async_llm()
        prompt = "abcd"
        for admitted in (0, 1):  # left while its text is read, and while it waits for the engine
            task = asyncio.create_task(llm.complete(prompt, SamplingParams(max_tokens=400, temperature=0.0)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await settled(lambda wanted=admitted: llm.engine.metrics.requests == wanted)
            assert await settled(lambda: not llm.engine.has_work)
            prompt = llm.engine.prepare("abcd", SamplingParams(max_tokens=400, temperature=0.0))
        assert llm.engine.metrics.output_tokens < 400, "it ran to its end although nobody waited"
        llm.close()

    in_time(scene())


def test_an_id_used_again_is_not_cancelled_by_its_former_owner() -> None:
    async def scene() -> None:
        llm = async_llm()
        short = SamplingParams(max_tokens=1, temperature=0.0)
        first = llm.generate("abcd", short, request_id="x")
        assert (await anext(first)).finished
        task = asyncio.create_task(listen(llm, request_id="x"))
        assert await settled(lambda: llm.engine.metrics.requests == 2)
        await first.aclose()
        assert (await task).outputs[0].finish_reason == "length"
        llm.close()

    in_time(scene())


def test_a_step_that_breaks_is_told_to_those_who_wait_and_others_are_served() -> None:
    async def scene() -> None:
        llm = async_llm()
        healthy, calls = llm.engine.scheduler.schedule, itertools.count()

        def flaky(*_: Any) -> Any:
            if next(calls) == 3:
                raise MemoryError("no room")
            return healthy(*_)

        llm.engine.scheduler.schedule = flaky  # type: ignore[method-assign]
        assert "no room" in str((await listen(llm)).error)
        assert (await listen(llm)).outputs[0].finish_reason == "length"
        llm.close()

    in_time(scene())


def test_a_thread_that_dies_leaves_nobody_waiting() -> None:
    async def scene() -> None:
        llm = async_llm()

        def dead() -> Any:
            raise SystemError("gone")

        llm.engine.step = dead  # type: ignore[method-assign]
        with pytest.raises(PacelineError, match="gone"):
            await listen(llm)
        with pytest.raises(RequestError, match="closed"):
            await listen(llm)

    in_time(scene())


def test_an_event_loop_that_is_gone_does_not_stop_the_engine() -> None:
    llm = async_llm()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(llm.generate("abcd", SamplingParams(max_tokens=400, temperature=0.0))))
    loop.close()
    assert in_time(listen(llm)).outputs[0].finish_reason == "length"
    llm.close()


def test_in_a_list_of_conversations_a_bad_one_fails_alone(llm: LLM) -> None:
    llm.engine.chat = ChatTemplate("{{ messages[0].content }}")
    outs = llm.chat([[{"role": "user", "content": "abcd"}], [{"content": "no role"}]],
                    SamplingParams(max_tokens=6, temperature=0.0))
    assert outs[0].outputs[0].text == "héllo"
    assert isinstance(outs[1].error, RequestError) and "role" in str(outs[1].error)
    for mistake in ({"role": "user", "content": "abcd"}, "abcd", []):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(mistake)  # type: ignore[arg-type]
