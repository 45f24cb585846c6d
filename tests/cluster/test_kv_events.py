"""KV events: who follows them knows what the cache holds, whatever is missed, late, malformed or forged."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

import zmq  # noqa: E402

from cluster.random_cache import SIZE, RandomCache  # noqa: E402
from engine.tiny import tiny_engine  # noqa: E402
from paceline import AsyncLLM, SamplingParams  # noqa: E402
from paceline.cache.keys import chain_keys, key_of, scope_key  # noqa: E402
from paceline.cache.manager import CacheManager  # noqa: E402
from paceline.cli.main import main  # noqa: E402
from paceline.cluster import kv_publisher, kv_reader  # noqa: E402
from paceline.cluster.kv_events import (  # noqa: E402
    DEVICE,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventError,
    decode,
    encode,
)
from paceline.cluster.kv_publisher import CacheWatcher, KVEventsPublisher, events_of  # noqa: E402
from paceline.cluster.kv_reader import KVEventsReader, PrefixIndex  # noqa: E402
from paceline.errors import ConfigError  # noqa: E402

ANY_PORT = "tcp://127.0.0.1:*"


def truth(cache: CacheManager) -> dict[str, set[int]]:
    return {DEVICE: {key_of(node) for node in cache.prefix.node_of[0].values()},
            HOST: {key_of(node) for node in cache.prefix.cold_node_of[0].values()}}


def believed(index: PrefixIndex) -> dict[str, set[int]]:
    return {medium: {key for key in index.held.get(medium, {}) if isinstance(key, int)} for medium in (DEVICE, HOST)}


def until(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"


def take_all(watcher: CacheWatcher) -> list[kv_publisher.Change | kv_publisher.Everything]:
    changes = []
    while (one := watcher.take()) is not None:
        changes.append(one)
    return changes


# ------------------------------------------------------------------ the index agrees with the cache

@pytest.mark.parametrize("most", [100_000, 7])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_who_follows_the_events_knows_the_cache_after_thousands_of_steps(most: int, seed: int) -> None:
    """Also where so many changes wait that they are dropped, and all is told anew."""
    world, index = RandomCache(seed), PrefixIndex()
    watcher = CacheWatcher(world.cache.prefix, lambda: None, most)
    watcher.watch()
    held = 0
    for step in range(600):
        world.step()
        if step % 10:
            continue
        changes = take_all(watcher)
        events, problems = decode(encode(events_of(changes, SIZE)))
        assert not problems
        for event in events:
            index.apply(event)
        if watcher._lost:  # nothing is known until the next change, and nothing false is believed
            assert not any(believed(index).values())
        else:
            assert believed(index) == truth(world.cache)
            held = max(held, *map(len, believed(index).values()))
    assert held > 5


def test_over_a_socket_with_a_gap_that_is_replayed() -> None:
    world = RandomCache(1)
    publisher = KVEventsPublisher(ANY_PORT, ANY_PORT)
    reader = KVEventsReader(publisher.address, publisher.replay_address)
    try:
        world.step()
        publisher.attach(world.cache.prefix)
        _agree(world, reader)
        for round in range(4):
            for _ in range(250):
                world.step()
            if round == 2:  # the reader is away, and what was sent meanwhile is lost to it
                until(lambda: not publisher._watcher._waiting)  # type: ignore[union-attr]
                time.sleep(0.2)
                while reader._events.poll(0):
                    reader._events.recv_multipart()
                world.step()
            _agree(world, reader)
        assert reader.gaps == 0 and not reader.dropped
        late = KVEventsReader(publisher.address, publisher.replay_address)
        try:
            _agree(world, late)  # who comes late has the past replayed
            assert late.gaps == 0
        finally:
            late.close()
    finally:
        reader.close()
        publisher.close()


def _agree(world: RandomCache, reader: KVEventsReader) -> None:
    def agrees() -> bool:
        world.step()  # who has just subscribed may have missed the last one
        until(lambda: not _waiting(world))
        reader.poll(0.2)
        reader.poll(0.05)
        return believed(reader.index) == truth(world.cache)

    until(agrees)


def _waiting(world: RandomCache) -> bool:
    listener = world.cache.prefix.listener
    return isinstance(listener, CacheWatcher) and bool(listener._waiting)


def test_a_gap_that_cannot_be_replayed_leaves_nothing_false() -> None:
    reader = KVEventsReader("tcp://127.0.0.1:1")
    try:
        reader._take(0, encode([_stored([1, 2, 3, 4])]))
        reader._take(2, encode([_stored([5, 6, 7, 8])]))
        assert reader.gaps == 1
        assert believed(reader.index)[DEVICE] == set(chain_keys([5, 6, 7, 8], "", 4))
        reader._take(0, encode([_stored([9, 9, 9, 9])]))  # who publishes has started anew
        assert believed(reader.index)[DEVICE] == set(chain_keys([9, 9, 9, 9], "", 4))
    finally:
        reader.close()


def test_a_publisher_that_began_anew_unheard_is_noticed() -> None:
    """Who reconnects misses its first batches; with what the one before it has told they would make no sense."""
    reader = KVEventsReader("tcp://127.0.0.1:1")
    try:
        for number in range(4):
            reader._take(number, encode([_stored([number] * 4)]))
        reader._take(1, encode([_stored([7, 7, 7, 7])]))
        reader._take(2, encode([_stored([8, 8, 8, 8])]))
        assert believed(reader.index)[DEVICE] == {chain_keys([one] * 4, "", 4)[0] for one in (7, 8)}
    finally:
        reader.close()


def test_a_replay_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reader, "LONGEST_REPLAY_S", 0.3)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        over = threading.Event()

        def drip() -> None:
            if router.poll(10_000):
                to = router.recv_multipart()[:-1]
                while not over.wait(0.02):
                    router.send_multipart([*to, (0).to_bytes(8, "big"), b""])

        dripping = threading.Thread(target=drip)
        dripping.start()
        reader = KVEventsReader("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}")
        enough = threading.Timer(10.0, over.set)
        enough.start()
        try:
            reader._take(3, encode([_stored([1, 2, 3, 4])]))
            assert not over.is_set() and reader.gaps == 1 and believed(reader.index)[DEVICE]
        finally:
            enough.cancel()
            over.set()
            dripping.join()
            reader.close()


def test_an_index_is_bounded_whatever_media_events_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reader, "MOST_HELD", 10)
    index = PrefixIndex()
    with suppress(EventError):
        for number in range(20):
            index.apply(replace(_stored([number] * 4), medium=f"m{number}"))
    assert sum(map(len, index.held.values())) == 10
    monkeypatch.setattr(kv_reader, "MOST_HELD", 1000)
    for number in range(20, 40):
        with suppress(EventError):
            index.apply(replace(_stored([number] * 4), medium=f"m{number}"))
    assert len(index.held) == kv_reader.MOST_MEDIA


def test_a_cache_without_listeners_does_as_before_and_one_is_told_of_what_is_there() -> None:
    world = RandomCache(3)
    for _ in range(50):
        world.step()
    assert world.cache.prefix.listener is None
    watcher, index = CacheWatcher(world.cache.prefix, lambda: None), PrefixIndex()
    watcher.watch()
    for event in events_of(take_all(watcher), SIZE):
        index.apply(event)
    assert believed(index) == truth(world.cache) and index.held


def test_a_server_publishes_what_its_requests_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = f"ipc://{tmp_path}/events"
    heard: list[int] = []

    def run(llm: AsyncLLM, *_: object) -> None:
        reader = KVEventsReader(port)

        def holds() -> bool:
            asyncio.run(llm.complete([len(heard) % 90, *range(30)], SamplingParams(max_tokens=1)))
            heard.append(reader.poll(0.1))
            return bool(reader.index.held.get(DEVICE))

        until(holds)
        assert not reader.dropped
        reader.close()
        llm.close()

    monkeypatch.setattr("paceline.AsyncLLM", lambda *_, **__: AsyncLLM(engine=tiny_engine()))
    monkeypatch.setattr("paceline.serve.server.run", run)
    monkeypatch.setattr("paceline.serve.logs.configure", lambda *_: None)
    assert main(["serve", "--port", "0", "--kv-events", port]) == 0
    assert heard
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-kv-events"]


# ------------------------------------------------------------------ what is in them

def _stored(tokens: list[int], scope: str = "") -> BlockStored:
    extra = [[scope_key(scope).hex()] for _ in range(len(tokens) // 4)] if scope else None
    return BlockStored(list(chain_keys(tokens, scope, 4)), None, tokens, 4, None, DEVICE, None, extra)


def _published(tokens: list[int], scope: str, adapters: dict[str, str] | None = None) -> list[dict[str, object]]:
    world = RandomCache(0)
    watcher = CacheWatcher(world.cache.prefix, lambda: None)
    watcher.watch()
    take_all(watcher)
    allocation = world.cache.open(tokens, salt=scope)
    assert allocation is not None and world.cache.reserve(allocation, 0, len(tokens)) == []
    world.cache.commit(allocation, tokens, len(tokens))
    payload = encode(events_of(take_all(watcher), SIZE, lambda: adapters or {}), at=1.5)
    at, events, rank = msgpack.unpackb(payload)
    assert (at, rank) == (1.5, 0)
    return events


def test_a_prompt_is_one_event_with_the_fields_of_the_format() -> None:
    tokens = list(range(10, 20))
    assert _published(tokens, "") == [{
        "type": "BlockStored", "block_hashes": chain_keys(tokens, "", 4), "parent_block_hash": None,
        "token_ids": tokens[:8], "block_size": 4, "medium": "GPU"}]


def test_a_salt_is_told_as_a_hash_and_an_adapter_by_its_name() -> None:
    scope = "adapter 12ab 3 bob secret"
    (event,) = _published(list(range(8)), scope, {"12ab": "sql"})
    assert event["lora_name"] == "sql" and event["extra_keys"] == [[scope_key(scope).hex()]] * 2
    assert "secret" not in str(event) and "bob" not in str(event)
    assert event["block_hashes"] == chain_keys(list(range(8)), scope, 4) != chain_keys(list(range(8)), "", 4)


def test_texts_are_found_in_their_own_scope_alone() -> None:
    index = PrefixIndex()
    index.apply(_stored([1, 2, 3, 4, 5, 6, 7, 8], "1 a "))
    assert index.match([1, 2, 3, 4, 5, 6, 7, 8, 9], "1 a ", 4) == 2
    assert index.match([1, 2, 3, 4, 5, 6, 7, 8, 9], "", 4) == index.match([1, 2, 3, 4], "1 b ", 4) == 0


# ------------------------------------------------------------------ bad input

GOOD = {"type": "BlockStored", "block_hashes": chain_keys([1, 2, 3, 4], "", 4), "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4], "block_size": 4}


@pytest.mark.parametrize("event", [
    7, None, [], {}, {"type": "Other"}, ["Other", 1], {"type": 3}, ["BlockStored"], GOOD | {"block_size": 0},
    GOOD | {"block_size": 3}, GOOD | {"token_ids": [1, 2, 3]}, GOOD | {"token_ids": [1, 2, 3, -4]},
    GOOD | {"token_ids": [1, 2, 3, "4"]}, GOOD | {"block_hashes": []}, GOOD | {"block_hashes": [1 << 64 - 1, {}]},
    GOOD | {"block_hashes": ["x"]}, GOOD | {"parent_block_hash": "x"}, GOOD | {"extra_keys": [1]},
    GOOD | {"extra_keys": [["zz"]]}, GOOD | {"medium": 5}, GOOD | {"lora_id": "x"}, GOOD | {"lora_name": "x" * 1000},
    {"type": "BlockRemoved"}, {"type": "BlockRemoved", "block_hashes": [True]},
    GOOD | {"block_hashes": [12345]},  # forged: not the hash of that text
    GOOD | {"parent_block_hash": 99},
    GOOD | {"extra_keys": [[scope_key("1 a ").hex()]]}, GOOD | {"extra_keys": [["00" * 300]]},
])
def test_what_is_no_event_is_dropped_with_a_reason(event: object) -> None:
    reader = KVEventsReader("tcp://127.0.0.1:1")
    try:
        reader._take(0, msgpack.packb([0.0, [event, GOOD], 0]))
        assert believed(reader.index)[DEVICE] == set(GOOD["block_hashes"])  # type: ignore[call-overload]
        assert sum(reader.dropped.values()) == 1 and all(reader.dropped)
    finally:
        reader.close()


@given(payload=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_bytes_of_any_kind_never_raise_anything_else(payload: bytes) -> None:
    with suppress(EventError):
        decode(payload)


def test_strangers_on_the_wire_are_dropped_and_the_loop_goes_on() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        reader = KVEventsReader(f"tcp://127.0.0.1:{port}")
        try:
            def heard() -> bool:
                stranger.send_multipart([b"kv-events", b"short", b""])
                stranger.send_multipart([b"kv-events"])
                stranger.send_multipart([b"kv-events", (0).to_bytes(8, "big"), b"\xc1"])
                reader.poll(0.05)
                return len(reader.dropped) >= 2

            until(heard)
        finally:
            reader.close()


def test_events_of_other_engines_are_read_in_either_form() -> None:
    index = PrefixIndex(verify=False)
    array = ["BlockStored", [b"\x01" * 32, 5], None, [1, 2], 1, None, "GPU", None, None]
    events, problems = decode(msgpack.packb([0.0, [array, ["BlockRemoved", [5], "GPU"]]]))
    for event in events:
        index.apply(event)
    assert not problems and set(index.held["GPU"]) == {b"\x01" * 32}
    assert [type(event) for event in events] == [BlockStored, BlockRemoved]
    assert decode(msgpack.packb([0.0, [["AllBlocksCleared"]]])) == ([AllBlocksCleared()], [])


def test_addresses_are_of_this_machine_unless_they_say_otherwise() -> None:
    assert kv_publisher.local("5557") == "tcp://127.0.0.1:5557"
    assert kv_publisher.local("tcp://*:5557") == "tcp://*:5557"
    with pytest.raises(ConfigError, match="tcp://127"):
        kv_publisher.local("nonsense")
    publisher = KVEventsPublisher(ANY_PORT)
    try:
        with pytest.raises(ConfigError, match="choose another address"):
            KVEventsPublisher(publisher.address)
    finally:
        publisher.close()


def test_a_wish_for_a_replay_that_is_none_is_dropped() -> None:
    publisher = KVEventsPublisher(ANY_PORT, ANY_PORT)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(publisher.replay_address)
            client.send_multipart([b"", b"xyz"])
            client.send_multipart([b"x" * 1000, (0).to_bytes(8, "big")])  # it would come back with every batch
            client.send_multipart([b"", (0).to_bytes(8, "big")])
            assert client.poll(10_000)
            assert client.recv_multipart() == [b"", (-1).to_bytes(8, "big", signed=True), b""]
    finally:
        publisher.close()


def test_who_asks_for_replays_without_end_holds_nobody_up() -> None:
    world = RandomCache(5)
    publisher = KVEventsPublisher(ANY_PORT, ANY_PORT)
    polled = 0

    class Greedy:
        """Always has another wish."""

        def poll(self, timeout: int) -> bool:
            nonlocal polled
            polled += 1
            return True

        def recv_multipart(self) -> list[bytes]:
            return [b"him", (0).to_bytes(8, "big")]

        def send_multipart(self, frames: list[bytes]) -> None:
            pass

    publisher._replay = Greedy()
    publisher._wake.set()
    until(lambda: polled > 3)
    world.step()
    publisher.attach(world.cache.prefix)
    until(lambda: publisher._next > 0)
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    closing.join(10)
    ended = not closing.is_alive()
    publisher._replay = None  # what ends it in any case
    assert ended
