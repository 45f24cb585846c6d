"""KVEventsPublisher: tells subscribers over ZMQ what an engine's prefix cache holds, from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from paceline.cache.keys import key_of, parent_key, scope_key, scope_of
from paceline.cache.prefix import Node, PrefixCache
from paceline.cluster.kv_events import (
    DEVICE,
    END_OF_REPLAY,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    encode,
    needed,
)
from paceline.errors import ConfigError
from paceline.request import adapter_of

log = logging.getLogger("paceline.cluster")

TOPIC = b"kv-events"
GROUP = 0
"""The cache group whose blocks are told of: full attention, where there is any. What others hold besides is not asked
by who looks for a beginning."""
MOST_WAITING = 1 << 16
"""Changes that may wait for the thread. If more do, it starts over with all that the cache holds."""
MOST_EVENTS = 1024
"""Of one batch."""
KEPT_BATCHES = 10_000
KEPT_BYTES = 64 << 20
"""What of the past can be replayed: as much as fits both."""
WAIT_S = 0.05
"""How long a wish for a replay may lie."""


class Change(NamedTuple):
    node: Node
    cold: bool
    stored: bool


class Everything(NamedTuple):
    """All that is held now, whatever was said before."""

    held: list[tuple[Node, bool]]


class CacheWatcher:
    """Hears of changes in the engine's thread, which never waits for it, and keeps them for another one."""

    def __init__(self, prefix: PrefixCache, wake: Callable[[], None], most: int = MOST_WAITING) -> None:
        self._prefix = prefix
        self._wake = wake
        self._most = most
        self._waiting: deque[Change | Everything] = deque()
        self._lost = False
        """Changes were dropped: as soon as the others are gone, everything is told anew."""

    def watch(self) -> None:
        """From now on, in the engine's thread."""
        self._start_over()
        self._prefix.listener = self

    def stored(self, node: Node, group: int, cold: bool) -> None:
        if group == GROUP:
            self._note(Change(node, cold, stored=True))

    def removed(self, node: Node, group: int, cold: bool) -> None:
        if group == GROUP:
            self._note(Change(node, cold, stored=False))

    def cleared(self) -> None:
        self._waiting.clear()
        self._lost = False
        self._waiting.append(Everything([]))
        self._wake()

    def lose(self) -> None:
        """In the other thread: some of what was taken could not be told."""
        self._lost = True

    def take(self) -> Change | Everything | None:
        """In the other thread."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _note(self, change: Change) -> None:
        if self._lost:
            if not self._waiting:
                self._start_over()
        elif len(self._waiting) >= self._most:
            self._lost = True
            self._waiting.clear()
            self._waiting.append(Everything([]))  # nothing false is believed meanwhile
        else:
            self._waiting.append(change)
        self._wake()

    def _start_over(self) -> None:
        self._lost = False
        held = [(node, False) for node in self._prefix.node_of[GROUP].values()]
        self._waiting.append(Everything(held + [(node, True) for node in self._prefix.cold_node_of[GROUP].values()]))


def events_of(changes: Iterable[Change | Everything], block_size: int,
              adapters: Callable[[], Mapping[str, str]] = dict) -> list[KVEvent]:
    """What subscribers are told. `adapters`: names by revision, those that are loaded now."""
    events: list[KVEvent] = []
    last: Change | None = None
    for change in changes:
        if isinstance(change, Everything):
            events.append(AllBlocksCleared())
            last = None
            for one in _parents_first(change.held):
                _add(events, one, last, block_size, adapters)
                last = one
        else:
            _add(events, change, last, block_size, adapters)
            last = change
    return events


def _add(events: list[KVEvent], change: Change, last: Change | None, block_size: int,
         adapters: Callable[[], Mapping[str, str]]) -> None:
    node, medium = change.node, HOST if change.cold else DEVICE
    newest = events[-1] if events and last is not None and last.cold is change.cold else None
    if isinstance(newest, BlockStored | BlockRemoved) and len(newest.block_hashes) >= MOST_EVENTS:
        newest = None
    if not change.stored:
        if isinstance(newest, BlockRemoved):
            newest.block_hashes.append(key_of(node))
        else:
            events.append(BlockRemoved([key_of(node)], medium))
        return
    if isinstance(newest, BlockStored) and last is not None and node.parent is last.node:
        newest.block_hashes.append(key_of(node))
        newest.token_ids.extend(node.tokens)
        if newest.extra_keys:
            newest.extra_keys.append(newest.extra_keys[0])
        return
    scope = scope_of(node)
    revision = adapter_of(scope)
    events.append(BlockStored([key_of(node)], parent_key(node), list(node.tokens), block_size, None, medium,
                              None if revision is None else adapters().get(revision),
                              [[scope_key(scope).hex()]] if scope else None))


def _parents_first(held: list[tuple[Node, bool]]) -> Iterable[Change]:
    """A chain that is told from its beginning can be told in one piece."""
    for cold in (False, True):
        left = {id(node): node for node, own in held if own is cold}
        for node in [node for node, own in held if own is cold]:
            line: list[Node] = []
            at: Node | None = node
            while at is not None and id(at) in left:
                line.append(left.pop(id(at)))
                at = at.parent
            yield from (Change(one, cold, stored=True) for one in reversed(line))


class KVEventsPublisher:
    """A PUB socket with what is new, and where asked for a ROUTER socket from which who missed something has it again.
    A subscriber that is slow loses events, and nobody waits for it."""

    def __init__(self, address: str, replay: str | None = None) -> None:
        """ZMQ addresses. Without a host: this machine alone; `*` or a host's own address lets others in."""
        self._zmq: Any = needed("zmq")
        needed("msgpack")
        self._context = self._zmq.Context()
        self._sockets: list[Any] = []
        self._publish = self._bind(self._zmq.PUB, address)
        self._replay = None if replay is None else self._bind(self._zmq.ROUTER, replay)
        self.address = _bound(self._publish)
        self.replay_address = None if self._replay is None else _bound(self._replay)
        self._wake = threading.Event()
        self._closing = False
        self._watcher: CacheWatcher | None = None
        self._block_size = 0
        self._adapters: Callable[[], Mapping[str, str]] = dict
        self._next = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._thread = threading.Thread(target=self._run, name="paceline-kv-events", daemon=True)
        self._thread.start()

    def attach(self, prefix: PrefixCache, adapters: Callable[[], Mapping[str, str]] = dict, *,
               most_waiting: int = MOST_WAITING) -> None:
        """In the engine's thread: tell of this cache from now on. `adapters`: names by revision, in any thread."""
        self._block_size, self._adapters = prefix.block_size, adapters
        self._watcher = CacheWatcher(prefix, self._wake.set, most_waiting)
        self._watcher.watch()
        self._wake.set()

    def close(self) -> None:
        """What was noted before is still sent."""
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _bind(self, kind: int, address: str) -> Any:
        full = local(address)
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(self._zmq.LINGER, 200)
        socket.setsockopt(self._zmq.SNDHWM, KEPT_BATCHES + 1)
        try:
            socket.bind(full)
        except self._zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events cannot be published at {full} ({problem}): choose another address, like "
                              "tcp://127.0.0.1:5557.") from None
        return socket

    def _run(self) -> None:
        while True:
            closing, busy = self._closing, False
            try:
                sent = self._send()
                busy = (not closing and self._serve_replay()) or sent  # in turns: neither waits for all of the other
            except Exception as problem:  # the next ones may go well, and requests do without
                log.error("KV events could not be sent", exc_info=problem)
                if self._watcher is not None:
                    self._watcher.lose()
            if busy:
                continue
            if closing:
                break
            self._wake.wait(None if self._replay is None else WAIT_S)
            self._wake.clear()
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def _send(self) -> bool:
        """One batch, if there is anything to tell."""
        changes: list[Change | Everything] = []
        while self._watcher is not None and len(changes) < MOST_EVENTS and (one := self._watcher.take()) is not None:
            changes.append(one)
        if not changes:
            return False
        payload = encode(events_of(changes, self._block_size, self._adapters))
        number, self._next = self._next, self._next + 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._publish.send_multipart([TOPIC, number.to_bytes(8, "big"), payload])
        return True

    def _serve_replay(self) -> bool:
        """One wish, if there is any."""
        if self._replay is None or not self._replay.poll(0):
            return False
        frames = self._replay.recv_multipart()
        to, empty, asked = frames[:1], frames[1:-1], frames[-1]
        if empty not in ([], [b""]) or len(frames) < 2 or len(asked) != 8:  # all but the last go back
            log.warning("a wish for a replay of KV events was dropped: it is no sequence number")
            return True
        start = int.from_bytes(asked, "big")
        for number, payload in self._kept:
            if number >= start:
                self._replay.send_multipart([*to, *empty, number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([*to, *empty, END_OF_REPLAY, b""])
        return True


def local(address: str) -> str:
    """A port alone is one of this machine, which nobody else reaches."""
    if address.isdigit():
        return f"tcp://127.0.0.1:{address}"
    if "://" not in address:
        raise ConfigError(f"{address!r} is no address for KV events: write one like tcp://127.0.0.1:5557, or a port.")
    return address


def _bound(socket: Any) -> str:
    found = socket.LAST_ENDPOINT
    return str(found.decode() if isinstance(found, bytes) else found).rstrip("\0")
