"""What can go wrong with workers, and what a client hears of it: nothing, or one clear error."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Set
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from cluster.mortal import SILENT, UNBORN, Crew, Doomed, Heard, Mortal, check_nothing_runs, follow, hear, mortal
from cluster.test_moving import GREEDY, SAMPLED, order_of
from grammar.structured import token
from paceline.cluster import moving
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.cluster.worker import LocalWorker, WorkerLost
from paceline.engine.records.deltas import Delta
from paceline.errors import NoWorkerError, QueueFullError, RequestError
from paceline.request import SamplingParams, Tenant
from paceline.serve.calls import _explain


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Mortal]]:
    made = [mortal("one"), mortal("two", block_size=16)]
    yield made
    for worker in made:
        worker.inner._llm.close()


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_that_dies_before_its_first_token(workers: list[Mortal]) -> None:
    order = order_of(SAMPLED | {"logprobs": 2, "n": 2})
    calm, _ = follow(order, workers[:1], [])
    wild, crew = follow(order, workers, [UNBORN, 0])
    wild.check_same(calm)
    assert crew.chosen == ["one", "two", "one"]
    assert wild.output is not None and wild.output.moved is not None and wild.output.moved.times == 2


class Speechless(Mortal):
    """Says its last token, and dies before it says that it was the last."""

    async def stream(self, order: Order, dies_after: int = 0) -> AsyncGenerator[Delta, None]:
        async with aclosing(self.inner.stream(order)) as deltas:
            async for delta in deltas:
                if delta.output is not None:
                    samples = [replace(sample, finish_reason=None, stop_reason=None) for sample in delta.samples]
                    yield Delta(samples, begun=delta.begun)
                    raise WorkerLost("it was the last")
                yield delta


@pytest.mark.parametrize("more", [{}, {"stop": ("b", "d")}, {"stop_token_ids": tuple(range(40, 90))}], ids=str)
def test_a_worker_that_dies_between_the_last_token_and_the_end(more: dict[str, Any], workers: list[Mortal]) -> None:
    order = order_of(SAMPLED | more)
    calm, _ = follow(order, workers[:1], [])
    wild, _ = follow(order, [Speechless(workers[0].inner), workers[1]], [])
    wild.check_same(calm)
    assert workers[1].orders[-1].so_far[0].token_ids == tuple(calm.tokens[0])


def test_one_sample_has_ended_when_its_worker_dies(workers: list[Mortal]) -> None:
    ends = tuple(range(5, 90))
    order = order_of(SAMPLED | {"n": 3, "stop_token_ids": ends, "logprobs": 1})
    calm, _ = follow(order, workers[:1], [])
    lengths = sorted(map(len, calm.tokens.values()))
    assert lengths[0] < lengths[1] - 1
    wild, _ = follow(order, workers, [3 * lengths[0] + 1])
    wild.check_same(calm)
    assert any(one.finish_reason for one in workers[1].orders[-1].so_far)


def test_workers_that_all_die(workers: list[Mortal], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never took the order tell nothing about it: twelve that did are enough."""
    monkeypatch.setattr(moving, "PAUSE_S", 0.001)
    monkeypatch.setattr(moving, "LONGEST_PAUSE_S", 0.001)
    with pytest.raises(NoWorkerError, match="24 workers were lost one after the other"):
        follow(order_of(GREEDY), workers, [3, *[UNBORN, SILENT] * 14])
    monkeypatch.setattr(moving, "PATIENCE_S", 0.05)
    with pytest.raises(NoWorkerError, match="workers were lost one after the other"):
        follow(order_of(GREEDY), workers, [UNBORN] * 500)
    with pytest.raises(NoWorkerError, match="start one"):
        follow(order_of(GREEDY), [], [])
    run(lambda: check_nothing_runs(workers))


def test_a_long_stream_may_lose_any_number_of_workers(workers: list[Mortal]) -> None:
    order = order_of(GREEDY | {"ignore_eos": True})
    wild, crew = follow(order, workers, [1] * 12)
    assert len(crew.chosen) == 13
    wild.check_same(follow(order, workers[:1], [])[0])


def test_the_request_s_own_error_goes_to_the_client_at_once(workers: list[Mortal]) -> None:
    crew = Crew(workers, [])

    async def main() -> None:
        stream = MovingStream(replace(order_of(GREEDY), adapter="nobody"), crew.choose)
        with pytest.raises(RequestError, match="nobody"):
            await stream.admitted()
        with pytest.raises(RequestError, match="nobody"):
            await hear(stream)

    run(main)
    assert crew.chosen == ["one"]


def test_admitted_before_the_first_token(workers: list[Mortal]) -> None:
    async def main() -> None:
        stream = MovingStream(order_of(GREEDY), Crew(workers, [UNBORN]).choose)
        await stream.admitted()
        assert stream.moves == 1
        assert (await stream.output()).finished

    run(main)


class Stuck(Crew):
    """Its second worker is long in coming."""

    async def choose(self, order: Order, lost: Set[str]) -> Doomed:
        if lost:
            await asyncio.sleep(3600)
        return await super().choose(order, lost)


@pytest.mark.parametrize("when", ["while a worker is looked for", "while one streams", "at once"])
def test_a_cancel_leaves_nothing_running(when: str, workers: list[Mortal]) -> None:
    async def main() -> None:
        crew = Stuck(workers, [4]) if "looked" in when else Crew(workers, [4])
        stream = MovingStream(order_of(GREEDY | {"ignore_eos": True, "max_tokens": 300, "n": 2}, "ngram"), crew.choose)
        if when != "at once":
            async for _ in stream:
                if stream.moves or ("looked" in when and len(stream._story._samples[0].token_ids) >= 2):
                    break
            if "looked" in when:
                while not stream.moves:
                    await asyncio.sleep(0.001)
        await stream.aclose()
        async for delta in stream:  # what had been said by then
            assert delta.output is None
        await check_nothing_runs(workers)

    run(main)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_that_passes_during_a_move(workers: list[Mortal]) -> None:
    clock = Clock()

    class Slow(Mortal):
        def die(self) -> WorkerLost:
            clock.now += 999.95  # what is left is waited for
            return super().die()

    async def main() -> Heard:
        order = order_of(GREEDY | {"ignore_eos": True, "timeout_s": 1000.0, "n": 2, "logprobs": 1})
        return await hear(MovingStream(order, Stuck([Slow(workers[0].inner)], [6]).choose, clock=clock))

    heard = run(main)
    assert set(heard.ends.values()) == {("timeout", None)}
    assert heard.output is not None
    assert [one.token_ids for one in heard.output.outputs] == list(heard.tokens.values())
    assert [one.text for one in heard.output.outputs] == list(heard.texts.values())
    assert all(len(one.logprobs or ()) == 3 for one in heard.output.outputs)
    assert heard.output.moved is not None and not heard.output.moved.exact
    assert heard.output.metrics.output_tokens == 6 and heard.output.metrics.ttft is not None


def test_a_deadline_counts_from_when_the_client_asked(workers: list[Mortal]) -> None:
    clock = Clock()

    class Late(Crew):
        async def choose(self, order: Order, lost: Set[str]) -> Doomed:
            clock.now += 40.0 if lost else 0.0
            return await super().choose(order, lost)

    async def main(timeout_s: float) -> Heard:
        order = order_of(GREEDY | {"timeout_s": timeout_s})
        return await hear(MovingStream(order, Late(workers, [3, 3]).choose, clock=clock))

    heard = run(lambda: main(1000.0))
    assert [order.age_s for order in workers[0].orders[-2:]] == [0.0, 80.0]
    assert workers[0].orders[-1].left_s == 920.0
    assert heard.ends[0][0] == "length"
    heard = run(lambda: main(60.0))
    assert heard.ends[0][0] == "timeout" and len(heard.tokens[0]) == 6


def test_a_worker_that_leaves_gives_its_streams_away() -> None:
    one, two = mortal("one"), mortal("two")
    order = order_of(SAMPLED | {"stop": ("zzz",), "ignore_eos": True})
    calm, _ = follow(order, [two], [])

    async def main() -> Heard:
        heard, stream = Heard(), MovingStream(order, Crew([one, two], []).choose)
        async for delta in stream:
            heard.add(delta)
            if len(heard.tokens[0]) == 4:
                one.inner.leave()
        with pytest.raises(WorkerLost, match="leaving"):
            await anext(one.stream(order))
        await check_nothing_runs([one, two])
        return heard

    heard = run(main)
    heard.check_same(calm)
    assert heard.output is not None and heard.output.moved is not None
    for worker in (one, two):
        worker.inner._llm.close()


def test_a_worker_whose_engine_ends() -> None:
    one, two = mortal("one"), mortal("two")
    order = order_of(SAMPLED | {"ignore_eos": True})
    calm, _ = follow(order, [two], [])

    async def main() -> Heard:
        heard, stream = Heard(), MovingStream(order, Crew([one, two, one, two], [2, 2]).choose)
        async for delta in stream:
            heard.add(delta)
            if len(heard.tokens[0]) == 3:
                await asyncio.to_thread(one.inner._llm.close)
        return heard

    run(main).check_same(calm)
    two.inner._llm.close()


def test_what_the_client_saw_is_what_the_metrics_say(workers: list[Mortal]) -> None:
    order = order_of(GREEDY | {"cache_salt": "of its own"})
    wild, _ = follow(order, workers, [5])
    assert wild.output is not None
    metrics = wild.output.metrics
    first, second = workers[0].orders[-1], workers[1].orders[-1]
    assert metrics.cached_tokens == 0 and metrics.prompt_tokens == len(order.prompt)
    assert first.age_s < metrics.ttft < second.age_s, "the first token came from the first worker"
    assert metrics.queue_time is not None and 0.0 <= metrics.queue_time < metrics.ttft
    assert metrics.finished - metrics.arrival > second.age_s
    assert metrics.steps > 0


@pytest.mark.parametrize("params", [{"beam_width": 3, "n": 2, "temperature": 0.0}, SAMPLED | {"best_of": 3}], ids=str)
def test_what_is_chosen_at_the_end_starts_over(params: dict[str, Any], workers: list[Mortal]) -> None:
    order = order_of(params | {"logprobs": 1})
    calm, _ = follow(order, workers[:1], [])
    wild, crew = follow(order, workers, [UNBORN, 0])
    assert len(crew.chosen) == 3
    assert calm.output is not None and wild.output is not None
    assert wild.output.outputs == calm.output.outputs and len(wild.output.outputs) == params.get("n", 1)
    assert wild.output.metrics.output_tokens == calm.output.metrics.output_tokens
    assert wild.output.moved is not None and wild.output.moved.times == 2


def test_a_rule_that_goes_by_q_changes_nothing_that_was_said(workers: list[Mortal]) -> None:
    order = order_of(SAMPLED | {"ignore_eos": True}, {"method": "exit", "k": 3, "verify": "rejection"})
    wild, _ = follow(order, workers, [4, 4])
    assert wild.output is not None and wild.output.moved is not None
    assert wild.output.outputs[0].token_ids == wild.tokens[0]
    assert wild.output.outputs[0].text == wild.texts[0]
    assert not wild.output.moved.exact
    greedy, _ = follow(replace(order, params=replace(order.params, temperature=0.0)), workers, [4, 4])
    assert greedy.output is not None and greedy.output.moved is not None and greedy.output.moved.exact


def test_a_text_is_exact_only_if_everybody_who_wrote_it_was(workers: list[Mortal]) -> None:
    """The first worker verifies its drafts by a rule that goes by q, the last one drafts nothing."""
    drafting = mortal("drafting", speculation={"method": "exit", "k": 3, "verify": "rejection"})
    try:
        order = replace(order_of(SAMPLED | {"ignore_eos": True}), speculation=...)
        for deaths, exact in (([4], False), ([UNBORN], True), ([0], True)):
            wild, _ = follow(order, [drafting, *workers], deaths)
            assert wild.output is not None and wild.output.moved is not None
            assert wild.output.moved.exact is exact, "who said nothing changed nothing"
    finally:
        drafting.inner._llm.close()


def test_an_accepted_request_is_not_refused_for_a_full_queue() -> None:
    full = mortal("full", max_num_seqs=1, max_queue=1)
    engine = full.inner._llm.engine
    order = replace(order_of(GREEDY), tenant=Tenant())

    async def main() -> None:
        for waiting in (0, 1):
            await full.inner._llm.ask(lambda engine: engine.add(
                list(order.prompt), SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0.0)))
            while engine.scheduler.queue_length != waiting:
                await asyncio.sleep(0.001)
        with pytest.raises(QueueFullError):
            await anext(full.stream(order))
        stream = full.stream(replace(order, moves=1))
        assert await anext(stream) == Delta()
        await stream.aclose()

    run(main)
    full.inner._llm.close()


def test_a_cancel_by_name_ends_the_stream(workers: list[Mortal]) -> None:
    async def main() -> None:
        worker = workers[0]
        stream = worker.stream(order_of(GREEDY | {"ignore_eos": True, "max_tokens": 300}))
        await anext(stream)
        await anext(stream)
        await worker.cancel("r")
        await worker.cancel("nobody")
        with pytest.raises(RequestError, match="cancelled"):
            while True:
                await anext(stream)
        await check_nothing_runs(workers)
        assert (await worker.report())["running"] == 0

    run(main)


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_an_order_that_is_being_admitted_can_be_ended_too(how: str) -> None:
    """By name, or because its worker leaves: nothing of it runs."""
    worker = mortal("one").inner

    async def main() -> None:
        reading, go_on, beside = asyncio.Event(), asyncio.Event(), worker._llm.texts.run

        async def slow(*given: Any) -> Any:
            reading.set()
            await go_on.wait()
            return await beside(*given)

        worker._llm.texts.run = slow  # type: ignore[method-assign]
        beginning = asyncio.ensure_future(anext(worker.stream(order_of(GREEDY | {"max_tokens": 300}))))
        await reading.wait()
        await worker.cancel("r") if how == "cancel" else worker.leave()
        go_on.set()
        with pytest.raises(RequestError if how == "cancel" else WorkerLost, match=r"cancelled|leaving"):
            await beginning
        assert not worker._opening
        await check_nothing_runs([Mortal(worker)])

    try:
        run(main)
    finally:
        worker._llm.close()


def test_the_same_worker_may_have_it_again_before_it_noticed(workers: list[Mortal]) -> None:
    """The connection broke, and the request still runs there under its id."""
    async def main() -> None:
        worker: LocalWorker = workers[0].inner
        order = order_of(GREEDY | {"ignore_eos": True, "max_tokens": 50})
        first = worker.stream(order)
        await anext(first)
        second = worker.stream(replace(order, moves=1))
        await anext(second)
        await first.aclose()
        heard = Heard()
        async for delta in second:
            heard.add(delta)
        assert heard.output is not None and heard.output.request_id == "r" and len(heard.tokens[0]) == 50
        await check_nothing_runs(workers)

    run(main)


def test_what_travels_can_be_pickled(workers: list[Mortal]) -> None:
    order = order_of(SAMPLED | {"logprobs": 2, "json_schema": {"type": "integer"}, "logit_bias": {token("a"): 1.0}})
    wild, _ = follow(order, workers, [1])
    for one in (order, workers[1].orders[-1], Delta(output=wild.output), WorkerLost("gone"),
                QueueFullError("full", 2.0)):
        again = pickle.loads(pickle.dumps(one))
        if isinstance(one, Exception):
            assert (str(again), again.__dict__) == (str(one), one.__dict__)
        else:
            assert again == one


def test_an_order_has_a_seed_and_nothing_that_stays_at_home() -> None:
    assert Order.of("r", [1], SamplingParams()).params.seed is not None
    with pytest.raises(RequestError, match="interrupt"):
        Order.of("r", [1], SamplingParams(interrupt=lambda text, ids: False))
    with pytest.raises(ValueError, match="seed"):
        Order(request_id="r", prompt=(1,), params=SamplingParams())


def test_the_answer_says_that_it_moved(workers: list[Mortal]) -> None:
    calm, _ = follow(order_of(GREEDY), workers[:1], [])
    wild, _ = follow(order_of(GREEDY), workers, [2])
    assert calm.output is not None and wild.output is not None
    assert "moved" not in _explain(calm.output)
    assert _explain(wild.output)["moved"] == {"times": 1, "exact": True}
