"""Prefill and decode replicas behind a front, without Ray: texts of one engine, whatever happens to either."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import parse_metrics, write_model

from cluster.handles import Handle, Response
from paceline import LLM, SamplingParams
from paceline.cluster.options import ClusterOptions
from paceline.errors import ConfigError, TransferError

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from paceline.cluster import deploy, front, roles
from paceline.cluster.reading import Facts, ModelTexts
from paceline.cluster.replica import Replica, ReplicaOptions
from paceline.cluster.roles import DecodeReplica, PrefillReplica
from paceline.cluster.serving import app
from paceline.cluster.serving import front as front_of
from paceline.cluster.transfer import chosen
from paceline.cluster.transfer.chosen import TransferOptions, Transports, place
from paceline.cluster.transfer.shared_memory import SharedMemoryTransport
from paceline.cluster.transfer.transport import Ticket
from paceline.serve.options import ServeOptions

WAIT = 60.0
PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
TOKEN = "the cluster's"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    params = SamplingParams(max_tokens=40, seed=4, temperature=1.0, ignore_eos=True)
    return LLM(str(folder), deterministic=True).generate(PROMPT, params)[0].outputs[0].text


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 4, "temperature": 1.0, "ignore_eos": True,
            **more}


@dataclass
class World:
    prefill: list[PrefillReplica]
    decode: list[DecodeReplica]
    to_prefill: Handle
    to_decode: Handle
    llm: Any
    client: httpx.AsyncClient

    @property
    def offers(self) -> int:
        """Blocks that anybody still keeps for somebody."""
        opened = [found.result() for one in self.prefill for found in one._transports._opened.values()]
        return sum(len(transport._leases) for transport in opened)

    @property
    def handed_over(self) -> int:
        return sum(one._pair.handed_over for one in self.decode)

    @property
    def failures(self) -> dict[str, int]:
        return self.decode[0]._pair.failures

    async def text(self, **more: Any) -> str:
        answered = await self.client.post("/v1/completions", json=body(**more))
        assert answered.status_code == 200, answered.text
        return str(answered.json()["choices"][0]["text"])


def play(folder: Path, scene: Callable[[World], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, *, decode: int = 1,
         transport: str = "auto") -> None:
    """And see that nothing is left of it."""
    monkeypatch.setattr(front, "ROLL_CALL_S", 0.05)
    options = ReplicaOptions({"model": str(folder), "deterministic": True, "warm_up": False}, threads=1)
    transfer = TransferOptions(transport, TOKEN)
    workers = [PrefillReplica(replace(options, role="prefill"), transfer, "p")]
    to_prefill = Handle(*workers)
    serving = [DecodeReplica(replace(options, role="decode"), transfer, to_prefill, f"d{number}")
               for number in range(decode)]
    to_decode = Handle(*serving)
    llm = front_of(deploy.Deployments(to_decode, to_prefill), ModelTexts.read(str(folder)), "127.0.0.1")

    async def run() -> None:
        reached = httpx.ASGITransport(app(llm, ServeOptions(model_name="tiny")), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=reached, base_url="http://127.0.0.1", timeout=WAIT) as client:
            world = World(workers, serving, to_prefill, to_decode, llm, client)
            await scene(world)
            while world.offers or llm.live or any(one._llm.live or one._tasks for one in (*workers, *serving)):
                await asyncio.sleep(0.01)
            for one in workers:
                assert one._llm.engine.cache.usage().used == 0

    try:
        asyncio.run(asyncio.wait_for(run(), WAIT))
    finally:
        llm.close()
        for one in (*workers, *serving):
            one._llm.close()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_texts_are_those_of_one_engine_and_metrics_tell_roles(folder: Path, expected: str, transport: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        assert await world.text() == expected
        assert (world.handed_over, world.failures) == (1, {})
        assert set(world.prefill[0]._transports._opened) == {"shared-memory" if transport == "auto" else "tcp"}
        assert await world.text() == expected
        assert world.handed_over == 1, "it has them"
        found = parse_metrics((await world.client.get("/metrics")).text)
        assert found['paceline_requests_total{replica="prefill-p"}'] == 1
        assert found['paceline_requests_total{replica="decode-d0"}'] == 2
        assert found['paceline_handovers_total{replica="decode-d0"}'] == 1
        assert found['vllm:request_success_total{finished_reason="length"}'] == 2, "clients' own"

    play(folder, scene, monkeypatch, transport=transport)


@pytest.mark.parametrize("how", ["dead", "nobody", "other version"])
def test_without_a_prefill_replica_the_decode_replica_computes(folder: Path, expected: str, how: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "TAKEN_S", 0.2)

    async def scene(world: World) -> None:
        if how == "other version":
            facts = world.prefill[0]._facts
            world.prefill[0]._facts = replace(facts, identity=facts.identity._replace(version="0"))
        else:
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if how == "dead":
                failed.set_exception(RayActorError())
            monkeypatch.setattr(world.to_prefill, "remote", lambda *order: Response(failed))
        assert await world.text() == expected
        assert world.failures == {"TransferError" if how == "nobody" else "WorkerLost": 1}
        assert world.prefill[0]._llm.engine.metrics.requests == 0

    play(folder, scene, monkeypatch)


def test_who_hangs_up_leaves_nothing_with_either(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the prompt is computed, and while its blocks are fetched."""
    async def scene(world: World) -> None:
        reached = asyncio.Event()
        inner = roles.Prefill.prefill

        async def slow(self: Any, order: Any, first: int = 0) -> Any:
            reached.set()
            await asyncio.sleep(0.05)
            return await inner(self, order, first)

        async def stuck(self: Any, ticket: Ticket) -> Any:
            assert world.offers == 1
            reached.set()
            await asyncio.Event().wait()

        for owner, name, how in ((roles.Prefill, "prefill", slow), (Transports, "fetch", stuck)):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, how)
                asked = asyncio.ensure_future(world.text())
                await reached.wait()
                asked.cancel()
                while world.llm.live or world.offers or world.prefill[0]._tasks or world.decode[0]._tasks:
                    await asyncio.sleep(0.01)
            reached.clear()
        assert world.handed_over == 0

    play(folder, scene, monkeypatch)


def test_a_dead_decode_replica_costs_the_prefill_replica_no_lease(folder: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        fetching = asyncio.Event()

        async def stuck(self: Any, ticket: Ticket) -> Any:
            fetching.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(Transports, "fetch", stuck)
        asked = asyncio.ensure_future(world.text())
        await fetching.wait()
        assert world.offers == 1
        world.decode[0]._pair._prefill._calls.close()  # what others see of a process that is gone
        while world.offers:
            await asyncio.sleep(0.01)
        asked.cancel()

    play(folder, scene, monkeypatch)


def test_a_leaving_decode_replica_hands_its_streams_on(folder: Path, expected: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        params = SamplingParams(max_tokens=40, seed=4, temperature=1.0, ignore_eos=True)
        stream = await world.llm.stream(world.llm.engine.prepare(PROMPT, params))
        text, leaver = "", ""
        async for delta in stream:
            text += "".join(sample.text for sample in delta.samples)
            if not leaver and text:
                leaver = world.to_decode.sent[-1]
                world.decode[int(leaver[1])]._local.leave()
        assert (text, stream.moves) == (expected, 1)
        assert world.to_decode.sent[-1] != leaver
        assert world.handed_over == 2, "to each of them"

    play(folder, scene, monkeypatch, decode=2)


def test_workers_that_do_not_fit_are_an_error_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        texts, handles = ModelTexts.read(str(folder)), deploy.Deployments(world.to_decode, world.to_prefill)
        facts = world.prefill[0]._facts
        for other, sentence in ((replace(facts, identity=facts.identity._replace(version="0")), "same version"),
                                (replace(facts, identity=facts.identity._replace(revision="1")), "same files"),
                                (replace(facts, blocks={**facts.blocks, "kv_dtype": "int8"}), "kv_dtype=int8")):
            world.prefill[0]._facts = other
            with pytest.raises(ConfigError, match=sentence):
                await asyncio.to_thread(front_of, handles, texts, "127.0.0.1")

    play(folder, scene, monkeypatch)


def test_what_a_cache_holds_is_told_by_options_that_decide_it(folder: Path) -> None:
    def facts(**options: Any) -> Facts:
        return Facts.of(LLM(str(folder), **options).engine)

    assert facts(deterministic=True).blocks == facts(deterministic=True, speculation="ngram", kv_blocks=300).blocks
    assert facts(deterministic=True).blocks != facts(deterministic=True, dtype="bfloat16").blocks


@pytest.mark.parametrize(("wrong", "sentence"), [
    ({"prefill_replicas": 1}, "go together"), ({"decode_replicas": 1}, "go together"),
    ({"prefill_replicas": 1, "decode_replicas": 1, "replicas": 2}, "give replicas, or"),
    ({"prefill_replicas": 0, "decode_replicas": 1}, "at least 1"),
    ({"prefill_replicas": 1, "decode_replicas": 1, "autoscale": (1, 2)}, "autoscale"),
    ({"prefill_replicas": 1, "decode_replicas": 1, "ranks": 2}, "tensor_parallel_size"),
    ({"prefill_replicas": 1, "decode_replicas": 1, "transfer": "pigeon"}, "shared-memory"),
    ({"replicas": 1, "prefill_threads": 2}, "prefill_threads"),
])
def test_roles_that_cannot_be_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ClusterOptions(**wrong)


def test_cores_are_shared_by_all_roles_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    apart = ClusterOptions(prefill_replicas=1, decode_replicas=2)
    assert (apart.threads_each, apart.prefill_threads_each, apart.cores) == (4, 4, 12)
    assert replace(apart, prefill_threads=2).cores == 10
    ranked = ClusterOptions(replicas=2, ranks=3)
    assert (ranked.threads_each, ranked.cores) == (2, 12)


def test_a_replica_asks_for_what_all_its_ranks_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.ray, "cluster_resources", lambda: {"GPU": 8.0})
    engine = {"model": "m", "tensor_parallel_size": 4}
    assert deploy.cards_each(engine) == 4
    assert deploy.cards_each({"model": "m"}) == 1
    assert deploy.cards_each({**engine, "device": "cpu"}) == 0
    options = ClusterOptions(replicas=2, ranks=4, threads=3)
    asked = deploy._made(Replica, "replica", options, 4).ray_actor_options
    assert (asked["num_cpus"], asked["num_gpus"]) == (12, 4)


def test_each_role_has_its_own_options() -> None:
    options = ClusterOptions(prefill_replicas=2, decode_replicas=3, threads=1, prefill_threads=4)
    replica = ReplicaOptions({"model": "m", "speculation": "ngram"}, 1)
    made = deploy.deployments(options, replica, 0, prefill_speculation=None)
    (prefill, transfer), (decode, same, handle) = (one._bound_deployment.init_args for one in (made.prefill,
                                                                                             made.serving))
    assert (prefill.role, prefill.threads, prefill.engine["speculation"]) == ("prefill", 4, None)
    assert (decode.role, decode.threads, decode.engine["speculation"]) == ("decode", 1, "ngram")
    assert transfer == same and transfer.token and transfer.token not in repr(options) + repr(transfer)
    assert not transfer.beyond and handle is made.prefill
    with pytest.raises(ConfigError, match="--no-prefix-caching"):
        deploy.deployments(options, replace(replica, engine={"enable_prefix_caching": False}), 0)


def test_each_pair_has_the_transport_that_connects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        auto = Transports(TransferOptions("auto", TOKEN), "127.0.0.1")
        assert (await auto.towards(place())).name == "shared-memory"
        assert (await auto.towards("elsewhere")).name == "tcp"
        told = Transports(TransferOptions("tcp", TOKEN), "127.0.0.1")
        assert (await told.towards(place())).name == "tcp"
        with pytest.raises(TransferError, match="same transport"):
            await told.fetch(Ticket("shared-memory", "", "", 0, "", 0))
        with pytest.raises(ConfigError, match="token"):
            await Transports(TransferOptions("tcp"), "127.0.0.1").towards(place())
        for one in (auto, told):
            one.close()

    asyncio.run(run())
    before = place()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert place() != before, "files are their owner's"
    monkeypatch.setattr(chosen, "memory_folder", lambda: Path("/proc"))
    assert SharedMemoryTransport(Path(tempfile.gettempdir())).name == "shared-memory"
