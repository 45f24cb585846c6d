"""Mail: letters in order, many in a message; nobody is read who does not know the token; an end is noticed."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from paceline.cluster import mail
from paceline.cluster.mail import HEAD, NONCE, Address, MailRoom, Sender, Stranger

WAIT = 20.0


class Front:
    def __init__(self) -> None:
        self.letters: list[tuple[str, list[Any]]] = []
        self.lost: list[str] = []
        self.room = MailRoom(lambda name, letters: self.letters.append((name, letters)), self.lost.append)

    def said(self) -> list[Any]:
        return [letter for _, letters in self.letters for letter in letters]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[Front, Address], Any]) -> None:
    async def whole() -> None:
        front = Front()
        try:
            await test(front, await front.room.open())
        finally:
            front.room.close()

    asyncio.run(asyncio.wait_for(whole(), WAIT))


def test_letters_of_one_turn_are_one_message() -> None:
    async def test(front: Front, address: Address) -> None:
        sender = await Sender.connect(address, "r1", lambda key: None)
        for number in range(50):
            sender.post(number % 3, number)
        await until(lambda: len(front.said()) == 50)
        assert front.said() == [(number % 3, number) for number in range(50)]
        assert front.letters[0][0] == "r1"
        assert len(front.letters) == 1
        sender.close()
        await until(lambda: front.lost == ["r1"])

    run(test)


def test_cancels_travel_back() -> None:
    async def test(front: Front, address: Address) -> None:
        given_up: list[int] = []
        sender = await Sender.connect(address, "r1", given_up.append)
        sender.post(7, "begun")
        await until(front.said)
        front.room.cancel("r1", 7)
        front.room.cancel("somebody else", 8)
        await until(lambda: given_up == [7])
        gone: list[bool] = []
        sender.when_closed(lambda: gone.append(True))
        front.room.part("r1")
        await until(lambda: gone == [True])
        assert not sender.open

    run(test)


def test_a_replica_that_came_again_is_not_lost_when_its_first_connection_ends() -> None:
    """What it had then is lost when it comes again, and not later: by then it has other orders."""
    async def test(front: Front, address: Address) -> None:
        first = await Sender.connect(address, "r1", lambda key: None)
        first.post(1, "begun")
        await until(front.said)
        given_up: list[int] = []
        second = await Sender.connect(address, "r1", given_up.append)
        await until(lambda: front.lost == ["r1"])
        second.post(2, "begun")
        await until(lambda: (2, "begun") in front.said())
        await until(lambda: not first.open)
        front.room.cancel("r1", 2)
        await until(lambda: given_up == [2])
        assert front.lost == ["r1"]
        second.close()
        await until(lambda: front.lost == ["r1", "r1"])

    run(test)


def test_a_replica_with_another_token_is_not_read() -> None:
    async def test(front: Front, address: Address) -> None:
        with pytest.raises((Stranger, EOFError, OSError)):
            await Sender.connect(Address(address.host, address.port, b"guess"), "r1", lambda key: None)
        assert (front.letters, front.lost) == ([], [])

    run(test)


def test_what_a_stranger_sends_is_never_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(mail.pickle, "loads", loaded.append)

    async def test(front: Front, address: Address) -> None:
        for greeting in (b"", b"x" * 10, b"x" * NONCE, b"x" * 2 * NONCE, b"\0" * 5000):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            body = pickle.dumps("r1")
            writer.write(greeting + HEAD.pack(len(body)) + body)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert loaded == []
        assert front.lost == []

    run(test)


def test_a_proof_is_good_for_one_side_and_one_connection() -> None:
    async def test(front: Front, address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        theirs = await reader.readexactly(NONCE)
        writer.write(theirs)  # the front's own nonce, so that its proof might serve as ours
        writer.write(await reader.readexactly(NONCE))
        assert await reader.read() == b"", "it hangs up"
        writer.close()

    run(test)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Address("127.0.0.1", 1, b"secret"))
