"""KVEventsReader: follows what engines publish of their caches, and keeps an index of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from paceline.cache.keys import SCOPE_BYTES, block_key, chain_keys
from paceline.cluster.kv_events import (
    DEVICE,
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventError,
    Key,
    KVEvent,
    decode,
    needed,
)
from paceline.cluster.kv_publisher import TOPIC, local
from paceline.errors import ConfigError

log = logging.getLogger("paceline.cluster")

MOST_AT_ONCE = 1000
"""Batches that one call takes in."""
MOST_HELD = 1 << 22
"""Blocks that an index believes one engine to hold, wherever they lie."""
MOST_MEDIA = 16
PATIENCE_S = 2.0
"""How long the next batch of a replay may take."""
LONGEST_REPLAY_S = 20.0
"""And all of them: who reads has live events to attend to."""


class HeldBlock(NamedTuple):
    parent: Key | None
    tokens: tuple[int, ...]
    scope: str
    """A hash of it; "": none."""


class PrefixIndex:
    """Which blocks of text an engine holds, by its events."""

    def __init__(self, verify: bool = True) -> None:
        """`verify`: believe a block only where its hash is that of its text and its parent, as Paceline makes it."""
        self._verify = verify
        self.held: dict[str, dict[Key, HeldBlock]] = {}
        """By medium."""

    def apply(self, event: KVEvent) -> None:
        """Raises EventError, and changes nothing, where an event cannot be true."""
        if isinstance(event, AllBlocksCleared):
            self.held = {}
        elif isinstance(event, BlockRemoved):
            held = self.held.get(event.medium or DEVICE, {})
            for key in event.block_hashes:
                held.pop(key, None)
        else:
            self._store(event)

    def match(self, tokens: Sequence[int], scope: str, block_size: int, medium: str = DEVICE) -> int:
        """How many whole blocks of a text's beginning the engine holds."""
        held, count = self.held.get(medium, {}), 0
        for key in chain_keys(tokens, scope, block_size):
            if key not in held:
                break
            count += 1
        return count

    def _store(self, event: BlockStored) -> None:
        parent, size, made = event.parent_block_hash, event.block_size, list[tuple[Key, HeldBlock]]()
        for place, key in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[place * size:(place + 1) * size])
            extra = event.extra_keys[place] if event.extra_keys else None
            scope = extra[0] if extra and isinstance(extra[0], str) else ""
            if self._verify and key != _expected(parent, tokens, scope):
                raise EventError("BlockStored: a hash is not that of its block's text")
            made.append((key, HeldBlock(parent, tokens, scope)))
            parent = key
        medium = event.medium or DEVICE
        if medium not in self.held and len(self.held) >= MOST_MEDIA:
            raise EventError(f"BlockStored: no engine has more than {MOST_MEDIA} media")
        if sum(map(len, self.held.values())) + len(made) > MOST_HELD:
            raise EventError(f"BlockStored: no engine holds more than {MOST_HELD} blocks")
        self.held.setdefault(medium, {}).update(made)


def _expected(parent: Key | None, tokens: tuple[int, ...], scope: str) -> Key | None:
    with suppress(ValueError, OverflowError):  # no hash of a scope, no key of ours
        own = bytes.fromhex(scope)
        if len(own) in (0, SCOPE_BYTES) and (parent is None or isinstance(parent, int)):
            return block_key(parent, tokens, own)
    return None


class KVEventsReader:
    """Of one engine. Whatever it receives, poll() does not raise: what is no event is dropped, and counted by why."""

    def __init__(self, address: str, replay: str | None = None, *, verify: bool = True) -> None:
        self._zmq: Any = needed("zmq")
        needed("msgpack")
        self._context = self._zmq.Context()
        self._events = self._connect(self._zmq.SUB, local(address))
        self._events.setsockopt(self._zmq.SUBSCRIBE, TOPIC)
        self._replay_address = None if replay is None else local(replay)
        if self._replay_address is not None:  # an address that is none is told now, not when something was missed
            self._connect(self._zmq.DEALER, self._replay_address).close(linger=0)
        self.index = PrefixIndex(verify)
        self.dropped: dict[str, int] = {}
        """How many events, by reason."""
        self.gaps = 0
        """How often something was missed for good: the index started over with what came after."""
        self._next: int | None = None
        """The number of the batch that comes next; None: any."""

    def poll(self, timeout_s: float = 0.0) -> int:
        """Take in what has come, waiting so long for the first batch; how many batches that were."""
        count = 0
        while count < MOST_AT_ONCE and self._events.poll(0 if count else int(1000 * timeout_s)):
            frames = self._events.recv_multipart()
            count += 1
            if len(frames) != 3 or len(frames[1]) != 8:
                self._drop("no batch: topic, sequence number, payload")
                continue
            self._take(int.from_bytes(frames[1], "big"), frames[2])
        return count

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, number: int, payload: bytes) -> None:
        first = self._next or 0
        if number < first:  # who publishes has begun anew, and its first batches may have gone by
            self._start_over()
            first = 0
        if number > first:
            self._catch_up(first, number)
        self._next = number + 1
        self._apply(payload)

    def _catch_up(self, first: int, before: int) -> None:
        """Batches were missed: those from `first` on."""
        batches = self._replayed(first, before)
        whole: list[bytes] = []
        for number in range(before - 1, first - 1, -1):  # those up to the one at hand, none of them missing
            if number not in batches:
                self._start_over()
                break
            whole.append(batches[number])
        for payload in reversed(whole):
            self._apply(payload)

    def _start_over(self) -> None:
        """What was removed meanwhile is not known: nothing is believed any more."""
        self.gaps += 1
        self.index.apply(AllBlocksCleared())

    def _replayed(self, first: int, before: int) -> dict[int, bytes]:
        """By their numbers, as far as they are still to be had."""
        if self._replay_address is None:
            return {}
        socket = self._connect(self._zmq.DEALER, self._replay_address)
        batches: dict[int, bytes] = {}
        end = time.monotonic() + LONGEST_REPLAY_S
        try:
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while (left := end - time.monotonic()) > 0 and socket.poll(int(1000 * min(PATIENCE_S, left))):
                frames = socket.recv_multipart()
                if len(frames) != 3 or frames[1] == END_OF_REPLAY:
                    break
                number = int.from_bytes(frames[1], "big")
                if first <= number < before:
                    batches[number] = frames[2]
        finally:
            socket.close(linger=0)
        return batches

    def _apply(self, payload: bytes) -> None:
        try:
            events, problems = decode(payload)
        except EventError as problem:
            self._drop(str(problem))
            return
        for reason in problems:
            self._drop(reason)
        for event in events:
            try:
                self.index.apply(event)
            except EventError as problem:
                self._drop(str(problem))

    def _drop(self, reason: str) -> None:
        if reason not in self.dropped:
            log.warning("a KV event was dropped: %s", reason)
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def _connect(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.RCVHWM, 0)
        try:
            socket.connect(address)
        except self._zmq.ZMQError as problem:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events cannot be read at {address} ({problem}): write an address like "
                              "tcp://127.0.0.1:5557.") from None
        return socket
