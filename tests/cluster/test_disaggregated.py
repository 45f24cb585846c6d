"""Prefill and decode apart: the texts of one engine alone, whatever fails on the way, and nothing left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.test_exchange import PROMPT
from engine.tiny import VOCAB, tiny_engine, tiny_model
from paceline import AsyncLLM, SamplingParams
from paceline.cluster.disaggregated import Decode, Disaggregated, Prefill
from paceline.cluster.moving import MovingStream
from paceline.cluster.order import Order
from paceline.cluster.transfer.shared_memory import SharedMemoryTransport
from paceline.cluster.transfer.tcp import TcpTransport
from paceline.cluster.transfer.transport import Ticket
from paceline.engine.records.deltas import Delta
from paceline.errors import EngineError, RequestError
from paceline.request import Tenant

MODEL = tiny_model("qwen2")
TOKEN = "the cluster's"
PARAMS = SamplingParams(max_tokens=10, temperature=0.9, seed=11, n=2, ignore_eos=True)


def order_of(name: str = "r", text: Sequence[int] = PROMPT, params: SamplingParams = PARAMS,
             tenant: Tenant | None = None) -> Order:
    return Order.of(name, text, params, speculation="ngram", tenant=tenant)


@dataclass
class World:
    source: AsyncLLM
    target: AsyncLLM
    sender: Any
    prefill: Prefill
    decode: Decode
    pair: Disaggregated

    async def tokens(self, order: Order | None = None) -> list[list[int]]:
        last: Delta | None = None
        async for delta in self.pair.stream(order or order_of()):
            last = delta
        assert last is not None and last.output is not None
        self.cached = last.output.metrics.cached_tokens
        return [sample.token_ids for sample in last.output.outputs]


def alone(order: Order | None = None) -> list[list[int]]:
    order, engine = order or order_of(), tiny_engine(MODEL)
    name = engine.add(list(order.text), order.params)
    while engine.has_work:
        engine.step()
    return [sample.token_ids for sample in engine.take(name).snapshot().outputs]


def play(scene: Callable[[World], Awaitable[None]], folder: Path, kind: str = "shared-memory", **options: Any) -> None:
    """And see that nothing is left of it."""
    async def run() -> None:
        source = AsyncLLM(engine=tiny_engine(MODEL, max_num_seqs=4))
        target = AsyncLLM(engine=tiny_engine(MODEL, **options))
        sender = TcpTransport(TOKEN) if kind == "tcp" else SharedMemoryTransport(folder)
        if isinstance(sender, TcpTransport):
            await sender.start()
        prefill = Prefill(source, sender, lease_s=20.0)
        decode = Decode(target, TcpTransport(TOKEN) if kind == "tcp" else SharedMemoryTransport(folder))
        world = World(source, target, sender, prefill, decode, Disaggregated(prefill, decode, pause_s=0.0))
        try:
            await scene(world)
            while world.pair._releases:
                await asyncio.sleep(0.01)
        finally:
            source.close()
            target.close()
        assert not len(sender._leases) and not list(folder.iterdir())
        for llm in (source, target):
            assert not llm.live and llm.engine.cache.usage().used == 0
            llm.engine.cache.check([])
        sender.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("kind", ["shared-memory", "tcp"])
def test_texts_are_those_of_one_engine(kind: str, tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        assert await world.tokens() == alone()
        assert world.cached == 56 and world.pair.handed_over == 1 and not world.pair.failures
        assert world.source.engine.metrics.prompt_tokens == 61
        longer = order_of("s", (*PROMPT, *(i % VOCAB for i in range(40))))  # a conversation goes on
        assert await world.tokens(longer) == alone(longer)
        assert world.cached == 96 and world.pair.handed_over == 2
        again = order_of("t", longer.text)  # all of it is there
        assert await world.tokens(again) == alone(again)
        assert world.pair.handed_over == 2 and world.source.engine.metrics.prompt_tokens == 61 + 101

    play(scene, tmp_path, kind)


def test_many_at_once(tmp_path: Path) -> None:
    orders = [order_of(str(i), tuple(PROMPT[:8 * (i % 3)]) + tuple((i * 7 + j * 5) % VOCAB for j in range(20 + i)))
              for i in range(8)]

    async def scene(world: World) -> None:
        async def one(order: Order) -> list[list[int]]:
            last: Any = None
            async for delta in world.pair.stream(order):
                last = delta
            return [sample.token_ids for sample in last.output.outputs]

        found = await asyncio.gather(*map(one, orders))
        assert list(found) == [alone(order) for order in orders]
        assert world.pair.handed_over >= 6 and not world.pair.failures

    play(scene, tmp_path)


def test_prompts_that_are_not_worth_it_stay(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        short = order_of(text=tuple(PROMPT[:8]))
        scored = order_of(params=SamplingParams(max_tokens=3, prompt_logprobs=0, seed=1, ignore_eos=True))
        world.pair._least = 60
        for order in (short, scored, order_of(text=tuple(PROMPT[:60]))):
            assert await world.tokens(order) == alone(order)
        assert world.source.engine.metrics.requests == 0

    play(scene, tmp_path)


def test_tenants_get_their_own_blocks(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        for tenant in (Tenant("her"), Tenant("him")):
            assert await world.tokens(order_of(tenant=tenant)) == alone()
            assert world.cached == 56
        assert world.pair.handed_over == 2  # what she had is nothing of his

    play(scene, tmp_path)


# ------------------------------------------------------------------ what goes wrong

class Broken(Prefill):
    """Does something else than it should."""

    def __init__(self, world: World, does: Callable[[Ticket], Any]) -> None:
        super().__init__(world.source, world.sender)
        self._does = does

    async def prefill(self, order: Any, first: int = 0) -> Ticket | None:
        ticket = await super().prefill(order, first)
        assert ticket is not None
        return self._does(ticket) or ticket


def corrupt(folder: Path) -> Callable[[Ticket], None]:
    def does(ticket: Ticket) -> None:
        path = folder / ticket.address
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)

    return does


def truncate(folder: Path) -> Callable[[Ticket], None]:
    def does(ticket: Ticket) -> None:
        path = folder / ticket.address
        path.write_bytes(path.read_bytes()[:-100])

    return does


def test_blocks_that_are_damaged_cut_off_or_gone_are_computed(tmp_path: Path,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        for number, does in enumerate((corrupt(tmp_path), truncate(tmp_path), world.sender.withdraw)):
            world.pair._prefill = Broken(world, does)
            order = order_of(str(number), tuple(PROMPT[number:]))
            with caplog.at_level(logging.WARNING):
                assert await world.tokens(order) == alone(order)
            assert world.cached == 0 and "computes its prompt itself" in caplog.text
        assert world.pair.failures == {"TransferError": 3} and not world.pair.handed_over

    play(scene, tmp_path)


def test_workers_that_do_not_fit_together_say_so_and_serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(world: World) -> None:
        with caplog.at_level(logging.WARNING):
            assert await world.tokens() == alone()
        assert "same block_size" in caplog.text and world.pair.failures == {"TransferError": 1}

    play(scene, tmp_path, block_size=4)


def test_a_prefill_worker_that_dies_refuses_or_hangs_costs_no_request(tmp_path: Path) -> None:
    def gone(*_: Any) -> None:
        raise EngineError("The worker is gone.")

    async def hangs(*_: Any) -> None:
        await asyncio.sleep(600)

    async def scene(world: World) -> None:
        class Dead(Broken):
            async def release(self, ticket: Ticket) -> None:
                world.sender.withdraw(ticket)
                gone()

        world.pair._prefill = Dead(world, gone)
        assert await world.tokens(order_of("a")) == alone()
        world.sender.close()  # what was offered before the call broke ends with its lease, or with its worker
        world.pair._patience_s = 0.2
        world.prefill.prefill = hangs  # type: ignore[assignment, method-assign]
        world.pair._prefill = world.prefill
        order = order_of("b", tuple(PROMPT[1:]))
        assert await world.tokens(order) == alone(order)
        assert world.pair.failures == {"EngineError": 1, "TimeoutError": 1}

    play(scene, tmp_path)


def test_after_a_failure_nobody_waits_for_the_same_for_a_while(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        now, fails = [0.0], [True]

        def does(ticket: Ticket) -> None:
            if fails[0]:
                world.sender.withdraw(ticket)

        world.pair = Disaggregated(Broken(world, does), world.decode, pause_s=1.0, clock=lambda: now[0])
        tried = []
        for number, at in enumerate((0.0, 0.5, 1.1, 2.9, 3.2, 5.0, 7.3, 7.4)):
            now[0], fails[0] = at, at < 7.0
            order = order_of(str(number), PROMPT[number:], replace(PARAMS, max_tokens=2, n=1))
            before = sum(world.pair.failures.values()) + world.pair.handed_over
            assert await world.tokens(order) == alone(order)
            tried.append(sum(world.pair.failures.values()) + world.pair.handed_over > before)
        assert tried == [True, False, True, False, True, False, True, True]
        with pytest.raises(RequestError):  # which is nobody else's business
            await world.tokens(order_of(text=(*PROMPT, VOCAB)))
        assert world.pair._paused_until < now[0]

    play(scene, tmp_path)


def test_a_deadline_that_is_near_is_nobody_elses_failure(tmp_path: Path) -> None:
    """Else whoever has no time would keep all others from being handed anything."""
    async def scene(world: World) -> None:
        world.pair = Disaggregated(world.prefill, world.decode, pause_s=60.0)
        hurried = order_of("h", params=replace(PARAMS, timeout_s=1e-6))
        last: Any = None
        async for delta in world.pair.stream(hurried):
            last = delta
        assert last.output.outputs[0].finish_reason == "timeout" and world.pair.failures == {"TimeoutError": 1}
        assert await world.tokens() == alone() and world.pair.handed_over == 1

        async def hangs(*_: Any) -> None:
            await asyncio.sleep(600)

        world.pair = Disaggregated(world.prefill, world.decode, pause_s=60.0, patience_s=0.1)
        world.prefill.prefill = hangs  # type: ignore[assignment, method-assign]
        for number in range(4):  # those who have a little time each find out together that nothing comes
            await world.tokens(order_of(str(number), PROMPT[number + 1:], replace(PARAMS, timeout_s=0.08)))
            assert (world.pair._paused_until > 0) == (number >= 2)

    play(scene, tmp_path)


def test_of_a_prompt_beyond_what_may_be_offered_the_beginning_comes(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        each = sum(world.source.engine.storage.block_bytes)
        world.pair = Disaggregated(Prefill(world.source, world.sender, most_bytes=3 * each), world.decode)
        assert await world.tokens() == alone()
        assert world.cached == 24 and world.pair.handed_over == 1 and not world.pair.failures
        assert world.source.engine.metrics.prompt_tokens == 25  # what nobody is handed is not computed

    play(scene, tmp_path)


def test_the_requests_own_errors_are_the_decode_workers(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        with pytest.raises(RequestError, match="out of range"):
            await world.tokens(order_of(text=(*PROMPT, VOCAB)))

    play(scene, tmp_path)


@pytest.mark.parametrize("how", ["leave", "cancel"])
def test_a_request_that_ends_while_its_blocks_are_under_way_leaves_nothing(how: str, tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        begun = asyncio.Event()

        async def never(*_: Any) -> int:
            begun.set()
            await asyncio.sleep(600)
            return 0

        world.decode.receive = never  # type: ignore[method-assign]
        asking = asyncio.ensure_future(world.tokens())
        await begun.wait()
        if how == "leave":
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        else:
            await world.pair.cancel("r")
            with pytest.raises(RequestError, match="cancelled"):
                await asking
        assert not world.pair._handing and not world.pair._cancelled
        assert world.target.engine.metrics.requests == 0

    play(scene, tmp_path)


def test_a_request_that_is_cancelled_just_when_its_blocks_have_come_does_not_run(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        hand_over = world.pair._hand_over

        async def cancelled_as_it_ends(order: Order) -> None:
            await hand_over(order)
            world.pair._cancelled.add("r")  # cancel(), between the end of this task and who waits for it

        world.pair._hand_over = cancelled_as_it_ends  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="cancelled"):
            await world.tokens()
        assert not world.pair._handing and not world.pair._cancelled
        assert world.target.engine.metrics.requests == 0

    play(scene, tmp_path)


def test_a_request_that_ends_while_its_prompt_is_computed_ends_there_too(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        asking = asyncio.ensure_future(world.tokens(order_of(text=tuple(i % VOCAB for i in range(400)))))
        while not world.source.live:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while world.source.live:
            await asyncio.sleep(0.01)

    play(scene, tmp_path)


def test_a_stream_whose_decode_worker_leaves_goes_on_with_another_one_and_new_blocks(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        third = AsyncLLM(engine=tiny_engine(MODEL))
        pairs = {"decode": world.pair, "third": Disaggregated(
            world.prefill, Decode(third, SharedMemoryTransport(tmp_path), "third"))}
        chosen: list[str] = []

        async def choose(order: Order, lost: Any) -> Any:
            chosen.append("third" if chosen else "decode")
            return pairs[chosen[-1]]

        order = order_of(params=replace(PARAMS, max_tokens=30))
        stream = MovingStream(order, choose)
        told: dict[int, list[int]] = {0: [], 1: []}
        async for delta in stream:
            for sample in delta.samples:
                told[sample.index] += sample.token_ids
            if len(told[0]) > 12 and len(chosen) == 1:
                world.decode.leave()
        assert [told[0], told[1]] == alone(order) and chosen == ["decode", "third"]
        assert pairs["third"].handed_over == 1
        while pairs["third"]._releases:
            await asyncio.sleep(0.01)
        third.close()
        third.engine.cache.check([])

    play(scene, tmp_path)
