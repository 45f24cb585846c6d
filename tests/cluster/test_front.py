"""The front without Ray: replicas in this process, behind a handle that does what Serve's does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import parse_metrics

from cluster.handles import Handle, Response
from paceline.errors import ConfigError, QueueFullError

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from paceline.cache.prefix import chain
from paceline.cluster import front as fronts
from paceline.cluster.calls import LETTERS_S
from paceline.cluster.features import block_set, features
from paceline.cluster.front import ClusterLLM
from paceline.cluster.mail import MailRoom, Sender
from paceline.cluster.order import Order
from paceline.cluster.reading import FrontModel, Identity, ModelTexts, check_identity
from paceline.cluster.replica import Replica, ReplicaOptions
from paceline.cluster.serving import app
from paceline.request import SamplingParams, Tenant
from paceline.serve.options import ServeOptions

WAIT = 60.0
HASHES = [-3797102770502019873, 126518397432286533]


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Any:
    options = ReplicaOptions({"model": str(folder), "deterministic": True, "warm_up": False}, threads=1)
    made = [Replica(options, name) for name in ("one", "two")]
    yield made
    for one in made:
        one._llm.close()


@pytest.fixture
def cluster(folder: Path, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fronts, "ROLL_CALL_S", 0.05)
    handle = Handle(*replicas)
    llm = ClusterLLM(handle, FrontModel(ModelTexts.read(str(folder)), replicas[0]._facts))
    yield handle, llm
    llm.close()


def run(llm: ClusterLLM, test: Callable[[httpx.AsyncClient], Any], **settings: Any) -> Any:
    async def whole() -> Any:
        made = app(llm, ServeOptions(model_name="tiny", **settings))
        transport = httpx.ASGITransport(made, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=WAIT) as client:
            return await asyncio.wait_for(test(client), WAIT)

    return asyncio.run(whole())


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 30, "seed": 4, "temperature": 1.0,
            "ignore_eos": True, **more}


def test_a_leaving_replica_hands_its_streams_on(cluster: Any, replicas: list[Replica]) -> None:
    handle, llm = cluster

    async def test(client: httpx.AsyncClient) -> tuple[str, list[str]]:
        whole = (await client.post("/v1/completions", json=body(max_tokens=200))).json()["choices"][0]["text"]
        prepared = llm.engine.prepare("Once upon a time", wanted_params(200))
        stream = await llm.stream(prepared)
        text, leaver = "", ""
        async for delta in stream:
            text += "".join(sample.text for sample in delta.samples)
            if not leaver and len(text) > 5:
                leaver = handle.sent[-1]
                handle.replicas.pop(leaver)  # as Serve takes one that drains off the list, and waits for it
        assert stream.moves == 1
        assert handle.sent[-1] != leaver
        return whole, [text]

    whole, (moved,) = run(llm, test)
    assert moved == whole
    for one in replicas:
        assert one._llm.live == 0


def wanted_params(tokens: int) -> Any:
    from paceline import SamplingParams

    return SamplingParams(max_tokens=tokens, seed=4, temperature=1.0, ignore_eos=True)


def test_without_a_healthy_replica_it_is_503_and_later_not(cluster: Any) -> None:
    handle, llm = cluster
    kept = dict(handle.replicas)

    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/ready")).status_code == 200
        handle.replicas.clear()
        while llm.replicas:
            await asyncio.sleep(0.01)
        for refused in (await client.post("/v1/completions", json=body()), await client.get("/ready")):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert "No replica is healthy" in refused.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200, "the front itself is well"
        assert (await client.get("/metrics")).status_code == 200
        handle.replicas.update(kept)
        while not llm.replicas:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", json=body())).status_code == 200

    run(llm, test)


def test_a_request_that_lost_its_last_replica_ends_with_an_error(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, llm = cluster
    monkeypatch.setattr(fronts, "COMING_S", 0.3)

    async def test(client: httpx.AsyncClient) -> None:
        asked = asyncio.ensure_future(client.post("/v1/completions", json=body(max_tokens=2000)))
        while not handle.sent:
            await asyncio.sleep(0.01)
        handle.replicas.clear()
        refused = await asked
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) > 0
        assert llm.live == 0

    run(llm, test)


def test_calls_that_fail_are_tried_elsewhere(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, llm = cluster
    tried: list[set[str]] = []
    remote = Handle.remote

    def failing(self: Handle, features: Any, *rest: Any) -> Any:
        tried.append(set(features.avoid))
        if len(tried) == 1:
            features.progress.replica = "one"
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(RayActorError())
            return Response(failed)
        return remote(self, features, *rest)

    monkeypatch.setattr(Handle, "remote", failing)

    async def test(client: httpx.AsyncClient) -> dict[str, Any]:
        answered = await client.post("/v1/completions", json=body())
        assert answered.status_code == 200, answered.text
        return answered.json()

    assert run(llm, test)["usage"]["completion_tokens"] == 30
    assert tried == [set(), {"one"}]
    assert handle.sent == ["two"]


def test_a_full_queue_is_no_refusal_while_there_is_another(cluster: Any, replicas: list[Replica],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    handle, llm = cluster
    full = {"one"}
    carry_out = Replica.carry_out

    async def refusing(self: Replica, *order: Any) -> Any:
        return QueueFullError("The queue is full.", 3.0) if self.name in full else await carry_out(self, *order)

    monkeypatch.setattr(Replica, "carry_out", refusing)

    async def test(client: httpx.AsyncClient) -> None:
        for number in range(4):
            answered = await client.post("/v1/completions", json=body(prompt=f"{number} " * 20, max_tokens=3))
            assert answered.status_code == 200, answered.text
            assert "moved" not in answered.json()["paceline"]
        full.add("two")
        handle.sent.clear()
        refused = await client.post("/v1/completions", json=body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert sorted(handle.sent) == ["one", "two"], "each was asked once"

    run(llm, test)


def test_a_full_queue_is_told_when_the_others_take_nothing(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roll call still knows the other one, and Serve sends nothing there any more."""
    handle, llm = cluster

    async def refusing(self: Replica, *order: Any) -> Any:
        return QueueFullError("The queue is full.", 3.0)

    monkeypatch.setattr(Replica, "carry_out", refusing)
    monkeypatch.setattr(handle.policy, "choose", lambda order, candidates: "one")

    async def test(client: httpx.AsyncClient) -> None:
        refused = await client.post("/v1/completions", json=body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert handle.sent == ["one", "one"]

    run(llm, test)


@pytest.mark.parametrize("slow", [(MailRoom, "open"), (Sender, "connect")])
def test_who_leaves_while_the_mail_is_opened_takes_nobody_along(cluster: Any, monkeypatch: pytest.MonkeyPatch,
                                                                slow: tuple[type, str]) -> None:
    _, llm = cluster
    opening, go_on = asyncio.Event(), asyncio.Event()
    inner = getattr(*slow)

    async def waiting(*arguments: Any) -> Any:
        opening.set()
        await go_on.wait()
        return await inner(*arguments)

    monkeypatch.setattr(*slow, waiting)

    async def test(client: httpx.AsyncClient) -> None:
        prepared = llm.engine.prepare("Once upon a time", wanted_params(3))
        first = asyncio.ensure_future(llm.complete(prepared))
        await opening.wait()
        second = asyncio.ensure_future(llm.complete(prepared))
        while llm.live < 2:
            await asyncio.sleep(0)
        first.cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
        go_on.set()
        output = await asyncio.wait_for(second, LETTERS_S / 2)
        assert output.metrics.output_tokens == 3
        assert output.moved is None

    run(llm, test)


@pytest.mark.parametrize("busy", [True, False])
def test_an_order_waits_its_turn_while_others_are_taken(cluster: Any, monkeypatch: pytest.MonkeyPatch,
                                                        busy: bool) -> None:
    """And is sent anew where nobody takes any."""
    _, llm = cluster
    monkeypatch.setattr(fronts, "ADMITTED_S", 0.1)
    carry_out, late = Replica.carry_out, asyncio.Event()
    first: list[Any] = []

    async def queued(self: Replica, wanted: Any, order: Order, *rest: Any) -> Any:
        if order.request_id == "late" and not first:
            first.append(order)
            await late.wait()
        return await carry_out(self, wanted, order, *rest)

    monkeypatch.setattr(Replica, "carry_out", queued)

    async def test(client: httpx.AsyncClient) -> int:
        prepared = llm.engine.prepare("Once upon a time", wanted_params(1))
        assert llm._replicas.calls.last_taken == -math.inf
        await llm.complete(prepared)
        assert llm._replicas.calls.last_taken > -math.inf
        if busy:
            llm._replicas.calls.last_taken = math.inf  # others are taken all the time
        asked = asyncio.ensure_future(llm.complete(prepared, request_id="late"))
        await asyncio.sleep(0.5)
        late.set()
        output = await asked
        return 0 if output.moved is None else output.moved.times

    assert run(llm, test) == (0 if busy else 1)


@pytest.mark.parametrize("cancels_travel", [True, False])
def test_orders_on_their_way_to_a_frozen_replica_go_elsewhere(
        cluster: Any, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch, cancels_travel: bool) -> None:
    """It neither answers the roll call nor takes orders, while others are taken all the time. Once it wakes up it
    computes nothing of what it was sent meanwhile, even where Serve could not take that back."""
    handle, llm = cluster
    monkeypatch.setattr(fronts, "ROLL_CALL_ANSWER_S", 0.1)
    frozen, begun = ["one"], []
    hello, carry_out = Replica.hello, Replica.carry_out

    async def woken(self: Replica) -> None:
        while self.name in frozen:
            await asyncio.sleep(0.01)

    async def silent(self: Replica) -> Any:
        await woken(self)
        return await hello(self)

    async def late(self: Replica, wanted: Any, order: Order, *rest: Any) -> Any:
        await woken(self)
        begun.append((self.name, order.request_id))
        return await carry_out(self, wanted, order, *rest)

    monkeypatch.setattr(Replica, "hello", silent)
    monkeypatch.setattr(Replica, "carry_out", late)
    if not cancels_travel:
        monkeypatch.setattr(Response, "cancel", lambda self: None)
        monkeypatch.setattr(Response, "__await__", lambda self: asyncio.shield(self._task).__await__())
    monkeypatch.setattr(handle.policy, "choose", lambda order, candidates: "two" if "one" in order.avoid else "one")

    async def test(client: httpx.AsyncClient) -> None:
        llm._replicas.calls.last_taken = math.inf
        before = (await replicas[0]._local.report())["output_tokens"]
        stream = await llm.stream(llm.engine.prepare("Once upon a time", wanted_params(3000)), request_id="early")
        told = [(await anext(stream)).samples for _ in range(3)]
        assert stream.moves == 1 and all(told)
        stream.close()
        await llm.complete(llm.engine.prepare("Once upon a time", wanted_params(1)), request_id="later")
        assert handle.sent == ["one", "two", "two"], "nothing new is sent to it"
        frozen.clear()
        while "one" not in llm.replicas or replicas[0]._orders:
            await asyncio.sleep(0.01)
        assert (("one", "early") in begun) is not cancels_travel
        while replicas[0]._llm.live:  # what it has begun all the same is being cancelled
            await asyncio.sleep(0.01)
        assert (await replicas[0]._local.report())["output_tokens"] - before < 1000
        assert not llm._replicas.calls._inboxes
        output = await llm.complete(llm.engine.prepare("Once upon a time", wanted_params(2)))
        assert handle.sent[-1] == "one" and output.moved is None

    run(llm, test)


def test_what_is_sent_to_a_replica_that_is_known_to_be_silent_does_not_stay_there(
        cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's router may choose it all the same, when it has told the front no better."""
    handle, llm = cluster
    monkeypatch.setattr(fronts, "ROLL_CALL_ANSWER_S", 0.1)
    frozen = True
    hello, carry_out = Replica.hello, Replica.carry_out

    async def silent(self: Replica) -> Any:
        while frozen and self.name == "one":
            await asyncio.sleep(0.01)
        return await hello(self)

    async def never(self: Replica, *order: Any) -> Any:
        if frozen and self.name == "one":
            await asyncio.Event().wait()
        return await carry_out(self, *order)

    monkeypatch.setattr(Replica, "hello", silent)
    monkeypatch.setattr(Replica, "carry_out", never)
    turns = iter(["one", "two"] * 3)
    monkeypatch.setattr(handle.policy, "choose", lambda order, candidates: next(turns))

    async def test(client: httpx.AsyncClient) -> None:
        nonlocal frozen
        llm._replicas.calls.last_taken = math.inf
        for _ in range(3):
            output = await llm.complete(llm.engine.prepare("Once upon a time", wanted_params(2)))
            assert output.moved is not None and output.moved.times == 1
        frozen = False

    run(llm, test)


def test_every_end_is_counted_once(cluster: Any) -> None:
    _, llm = cluster

    async def test(client: httpx.AsyncClient) -> dict[str, float]:
        assert (await client.post("/v1/completions", json=body())).status_code == 200
        assert (await client.post("/v1/completions", json=body(temperature=-1))).status_code == 400
        assert (await client.post("/v1/completions", json=body(guided_regex="("))).status_code == 400
        stream = await llm.stream(llm.engine.prepare("Once", wanted_params(2000)))
        await anext(stream)
        stream.close()
        while llm.live:
            await asyncio.sleep(0.01)
        return parse_metrics((await client.get("/metrics")).text)

    found = run(llm, test)
    assert found['vllm:request_success_total{finished_reason="length"}'] == 1
    assert found['vllm:request_success_total{finished_reason="abort"}'] == 1
    assert found["vllm:request_generation_tokens_sum"] == 30
    assert {name for name in found if name.startswith("paceline_steps_total")} == {
        'paceline_steps_total{replica="one"}', 'paceline_steps_total{replica="two"}'}


def test_a_replica_that_does_not_answer_hides_no_other(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm = cluster
    view = Replica.view

    async def silent(self: Replica, *arguments: Any) -> Any:
        if self.name == "one":
            raise TimeoutError
        return await view(self, *arguments)

    monkeypatch.setattr(Replica, "view", silent)

    async def test(client: httpx.AsyncClient) -> dict[str, float]:
        return parse_metrics((await client.get("/metrics")).text)

    assert {name for name in run(llm, test) if name.startswith("paceline_steps_total")} == {
        'paceline_steps_total{replica="two"}'}


def test_quotas_know_what_replicas_wrote(cluster: Any) -> None:
    from paceline.serve.quotas import Quota

    _, llm = cluster

    async def test(client: httpx.AsyncClient) -> list[int]:
        return [(await client.post("/v1/completions", json=body())).status_code for _ in range(3)]

    assert run(llm, test, quota=Quota(tokens_per_minute=40)) == [200, 429, 429]


def test_who_leaves_before_the_first_token_pays_for_a_prompt_that_was_computed(
        cluster: Any, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for one that waited: as without replicas."""
    _, llm = cluster
    ended: list[Any] = []
    post = Sender.post

    def withheld(self: Sender, key: int, news: Any) -> None:
        if not getattr(news, "samples", ()):
            post(self, key, news)

    monkeypatch.setattr(Sender, "post", withheld)

    async def give_up(waits: bool) -> None:
        stream = await llm.stream(llm.engine.prepare("Once upon a time", wanted_params(2000)), request_id="r")
        while not waits and all(one._local.queue_s("r") is None for one in replicas):
            await asyncio.sleep(0.001)
        stream.close()
        while llm.live:
            await asyncio.sleep(0.001)

    async def test(client: httpx.AsyncClient) -> None:
        llm.on_end = ended.append
        await give_up(waits=False)
        monkeypatch.setattr(Replica, "_queue_s", lambda self, request_id: None)
        await give_up(waits=True)

    run(llm, test)
    paid, free = ended
    assert paid.metrics.first_scheduled is not None and paid.metrics.output_tokens == 0
    assert free.metrics.first_scheduled is None


def test_another_version_or_model_is_not_used(cluster: Any, replicas: list[Replica]) -> None:
    _, llm = cluster
    own = replicas[0]._facts.identity
    with pytest.raises(ConfigError, match="install the same version"):
        check_identity(own, own._replace(version="0"))
    with pytest.raises(ConfigError, match="same files"):
        check_identity(own, own._replace(revision="other"))
    before = replicas[0]._facts
    replicas[0]._facts = replace(before, identity=Identity(own.version, "other"))
    try:
        async def test(client: httpx.AsyncClient) -> None:
            while llm.replicas != {"two"}:
                await asyncio.sleep(0.01)
            for number in range(4):
                answered = await client.post("/v1/completions", json=body(prompt=f"{number} " * 9))
                assert answered.status_code == 200, answered.text

        run(llm, test)
    finally:
        replicas[0]._facts = before


def test_the_front_refuses_what_an_engine_would(cluster: Any, replicas: list[Replica]) -> None:
    _, llm = cluster
    engine = replicas[0]._llm.engine
    for prompt in ("some words", [1, 2, 3]):
        made, own = llm.engine.prepare(prompt, wanted_params(3)), engine.prepare(prompt, wanted_params(3))
        assert (made.ids, made.text, made.stops, made.bad_words) == (own.ids, own.text, own.stops, own.bad_words)
    conversation = [{"role": "user", "content": "hello"}]
    assert llm.engine.render(conversation) == engine.render(conversation)


def test_every_protocol_is_spoken_by_the_front(cluster: Any, replicas: list[Replica]) -> None:
    _, llm = cluster
    asked = {"model": "tiny", "seed": 4, "ignore_eos": True}
    said = [{"role": "user", "content": "hello"}]

    async def test(client: httpx.AsyncClient) -> list[Any]:
        async def post(path: str, **more: Any) -> Any:
            answer = await client.post(path, json=more)
            assert answer.status_code == 200, answer.text
            return answer.json()

        chat = await post("/chat/completions", **asked, messages=said, max_tokens=8)
        response = await post("/v1/responses", **asked, input="hello", max_output_tokens=8)
        kept = (await client.get(f"/v1/responses/{response['id']}")).json()
        message = await post("/v1/messages", **asked, messages=said, max_tokens=8)
        ollama = await post("/api/generate", model="tiny", prompt="hello", raw=True, stream=False,
                            options={"seed": 4, "num_predict": 8, "temperature": 0})
        llama = await post("/completion", prompt="hello", n_predict=8, temperature=0)
        vector = await post("/v1/embeddings", input="hello there")
        props, slots = (await client.get("/props")).json(), (await client.get("/slots")).json()
        assert (await client.head("/docs")).status_code == 200
        assert props["total_slots"] == len(slots) and kept["output"] == response["output"]
        assert ollama["response"] == llama["content"] and ollama["eval_count"] == llama["tokens_predicted"]
        texts = [chat["choices"][0]["message"]["content"], response["output"][0]["content"][0]["text"],
                 message["content"][0]["text"]]
        return [texts, vector["data"][0]["embedding"]]

    texts, vector = run(llm, test)
    assert texts == [texts[0]] * 3 and texts[0]
    own = asyncio.run(replicas[0]._llm.complete("hello there", SamplingParams(max_tokens=0, pooling="mean")))
    assert vector == own.embedding


@pytest.mark.parametrize("tenant", [Tenant("somebody"), Tenant("somebody", shares_cache=True)])
@pytest.mark.parametrize("salt", ["", "pepper"])
def test_a_front_knows_blocks_by_the_hashes_that_replicas_publish(cluster: Any, replicas: list[Replica], tenant: Tenant,
                                                                  salt: str) -> None:
    _, llm = cluster
    prompt = [7 + number % 50 for number in range(100)]
    params = replace(wanted_params(2), cache_salt=salt)

    async def test(client: httpx.AsyncClient) -> list[frozenset[int]]:
        await llm.complete(llm.engine.prepare(prompt, params), tenant=tenant)
        return [block_set((await one.record_routing_stats())["blocks"]) for one in replicas]

    held = run(llm, test)
    made = features(Order.of("a", prompt, params, tenant=tenant), llm.engine.config.block_size, {})
    other = features(Order.of("a", prompt, replace(params, cache_salt="other"), tenant=tenant),
                     llm.engine.config.block_size, {})
    assert max(made.cached(blocks) for blocks in held) == len(made.digests) * llm.engine.config.block_size > 80
    assert all(other.cached(blocks) == 0 for blocks in held)


def test_hashes_are_the_same_in_every_process() -> None:
    assert chain(list(range(40)), "pepper", 16) == HASHES
