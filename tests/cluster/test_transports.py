"""Transports: blocks arrive to the byte or not at all, and nothing of them stays behind, whoever dies."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.test_exchange import PROMPT, blocks_of
from engine.tiny import tiny_engine, tiny_model
from paceline.cluster.transfer import shared_memory, tcp
from paceline.cluster.transfer.named import TRANSPORTS, open_transport
from paceline.cluster.transfer.shared_memory import PREFIX, UNFINISHED, SharedMemoryTransport
from paceline.cluster.transfer.tcp import TcpTransport
from paceline.cluster.transfer.transport import Leases, Ticket
from paceline.cluster.transfer.wire import BEGIN, digest_of, pack, pack_head, unpack, unpack_head
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import ConfigError, TransferError

TOKEN = "the cluster's"


@pytest.fixture(scope="module")
def blocks() -> PrefixBlocks:
    return blocks_of()


def same(one: PrefixBlocks, other: PrefixBlocks) -> bool:
    return replace(one, data=()) == replace(other, data=()) and all(map(torch.equal, one.data, other.data))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------ bytes

def test_blocks_are_the_same_after_a_journey(blocks: PrefixBlocks) -> None:
    sent = bytearray(b"".join(pack(blocks)))
    found = unpack(sent, digest_of(pack(blocks)))
    assert same(found, blocks)
    target = tiny_engine(tiny_model())
    assert target.exchange.import_prefix(found, PROMPT, "") == 7


def test_every_flipped_or_missing_byte_is_noticed(blocks: PrefixBlocks) -> None:
    sent, digest = b"".join(pack(blocks)), digest_of(pack(blocks))
    for at in (0, 20, BEGIN + 3, len(sent) // 2, len(sent) - 1):
        broken = bytearray(sent)
        broken[at] ^= 1
        with pytest.raises(TransferError, match="checksum"):
            unpack(broken, digest)
        with pytest.raises(TransferError, match="checksum"):
            unpack(bytearray(sent[:at]), digest)


@pytest.mark.parametrize("change", [
    lambda head: head[:10], lambda head: b"x" + head[1:], lambda head: head[:-5], lambda head: head[:BEGIN] + b"[]",
    lambda head: head.replace(b'"tokens": [', b'"tokens": [-1, '), lambda head: head.replace(b'"rows"', b'"wors"'),
    lambda head: head.replace(b'"rows": [[', b'"rows": [[-'), lambda head: head.replace(b'"pieces": [', b'"pieces": ['
                                                                                        b'[], '),
    lambda head: head.replace(b'"rows": [[7', b'"rows": [[1e999'),
])
def test_a_head_that_is_none_is_refused_even_where_its_checksum_fits(blocks: PrefixBlocks, change: Any) -> None:
    """Who offers knows the token; what it says is checked all the same."""
    head = change(pack_head(blocks))
    if len(head) >= BEGIN:
        head = head[:BEGIN - 8] + (len(head) - BEGIN).to_bytes(8, "big") + head[BEGIN:]
    sent = head + b"".join(pack(blocks)[1:])
    target = tiny_engine(tiny_model())
    with pytest.raises(TransferError):
        found = unpack(bytearray(sent), digest_of([memoryview(sent)]))
        target.exchange.import_prefix(found, PROMPT, "")
    assert not target.cache.prefix.nodes()


def test_no_announcement_asks_for_memory_that_does_not_come(blocks: PrefixBlocks) -> None:
    head = pack_head(blocks).replace(b'"rows": [[', b'"rows": [[99999999999999')
    head = head[:BEGIN - 8] + (len(head) - BEGIN).to_bytes(8, "big") + head[BEGIN:]
    assert unpack_head(head)[0][0][0] > 1 << 40
    with pytest.raises(TransferError, match="not as many"):
        unpack(bytearray(head), digest_of([memoryview(head)]))


# ------------------------------------------------------------------ both

def transports(kind: str, folder: Path) -> tuple[Any, Any]:
    if kind == "tcp":
        return TcpTransport(TOKEN), TcpTransport(TOKEN)
    return SharedMemoryTransport(folder), SharedMemoryTransport(folder)


@pytest.mark.parametrize("kind", ["shared-memory", "tcp"])
def test_what_is_offered_can_be_fetched_until_it_is_withdrawn(kind: str, tmp_path: Path, blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source, target = transports(kind, tmp_path)
        if kind == "tcp":
            await source.start()
        ticket = await source.offer(blocks)
        ticket = pickle.loads(pickle.dumps(ticket))
        assert ticket.transport == kind and ticket.tokens == 56
        assert same(await target.fetch(ticket), blocks) and same(await target.fetch(ticket), blocks)
        source.withdraw(ticket)
        source.withdraw(ticket)
        with pytest.raises(TransferError):
            await target.fetch(ticket)
        short = await source.offer(blocks, lease_s=0.05)
        kept = await source.offer(blocks)
        await asyncio.sleep(0.2)
        with pytest.raises(TransferError):
            await target.fetch(short)
        assert same(await target.fetch(kept), blocks)
        for wrong in (replace(kept, digest="0" * 64), replace(kept, size=kept.size - 1),
                      replace(kept, size=kept.size + 1)):
            with pytest.raises(TransferError):
                await target.fetch(wrong)
        source.close()
        with pytest.raises(TransferError):
            await source.offer(blocks)
        with pytest.raises(TransferError):
            await target.fetch(kept)
        assert not len(source._leases) and not left_in(tmp_path)

    asyncio.run(run())


def test_offers_take_bounded_memory(tmp_path: Path, blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source = SharedMemoryTransport(tmp_path, most_bytes=int(1.5 * blocks.nbytes))
        ticket = await source.offer(blocks)
        with pytest.raises(TransferError, match="wait to be fetched"):
            await source.offer(blocks)
        source.withdraw(ticket)
        await source.offer(blocks)
        source.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["shared-memory", "tcp"])
def test_offers_made_at_once_take_bounded_memory_too(kind: str, tmp_path: Path, blocks: PrefixBlocks) -> None:
    """And one whose transport is closed while it is made leaves nothing."""
    async def run() -> None:
        source, _ = transports(kind, tmp_path)
        source._leases = Leases(int(1.5 * blocks.nbytes))
        if kind == "tcp":
            await source.start()
        made = await asyncio.gather(*(source.offer(blocks) for _ in range(3)), return_exceptions=True)
        assert sorted(type(one).__name__ for one in made) == ["Ticket", "TransferError", "TransferError"]
        assert len(left_in(tmp_path)) == (kind == "shared-memory")
        source.withdraw(next(one for one in made if isinstance(one, Ticket)))
        late = asyncio.ensure_future(source.offer(blocks))
        await asyncio.sleep(0)
        source.close()
        with pytest.raises(TransferError, match="leaves"):
            await late
        assert not len(source._leases) and not left_in(tmp_path)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["shared-memory", "tcp"])
@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_a_ticket_for_more_than_there_can_be_is_refused(kind: str, size: int, tmp_path: Path) -> None:
    ticket = Ticket(kind, "127.0.0.1:1" if kind == "tcp" else PREFIX + "0" * 32, "k" * 32, size, "0", 8)
    with pytest.raises(TransferError, match="announces"):
        asyncio.run(transports(kind, tmp_path)[0].fetch(ticket))


def test_a_lease_ends_once() -> None:
    async def run() -> None:
        ended: list[str] = []
        leases = Leases()
        first = leases.begin(5, 60.0, lambda: ended.append("first"))
        leases.begin(7, 0.0, lambda: ended.append("second"))
        assert leases.bytes == 12
        await asyncio.sleep(0.05)
        leases.end(first)
        leases.end(first)
        leases.close()
        assert ended == ["second", "first"] and leases.bytes == 0

    asyncio.run(run())


def test_both_sides_need_the_same_transport(tmp_path: Path, blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source = SharedMemoryTransport(tmp_path)
        ticket = await source.offer(blocks)
        with pytest.raises(TransferError, match="offered by shared-memory and this worker fetches by tcp"):
            await TcpTransport(TOKEN).fetch(ticket)
        source.close()

    asyncio.run(run())


def test_transports_have_names() -> None:
    async def run() -> None:
        for name in ("shared-memory", "tcp"):
            opened = await open_transport(name, token=TOKEN)
            assert opened.name == name in TRANSPORTS
            opened.close()
        with pytest.raises(ConfigError, match="use one of shared-memory, tcp, cuda-ipc, nixl"):
            await open_transport("pigeon")
        with pytest.raises(ConfigError, match="token"):
            await open_transport("tcp")

    asyncio.run(run())


# ------------------------------------------------------------------ shared memory

OWNER = """
import asyncio, sys
from pathlib import Path
from paceline.cluster.transfer.shared_memory import SharedMemoryTransport
from paceline.engine.exchange import PrefixBlocks
async def main():
    made = SharedMemoryTransport(Path(sys.argv[1]))
    ticket = await made.offer(PrefixBlocks({}, 8, (), "", tuple(range(56)), (), ()))
    print(ticket.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


PIPED = """
import faulthandler, sys
from pathlib import Path
from paceline.cluster.transfer import shared_memory
from paceline.cluster.transfer.transport import Ticket
from paceline.errors import TransferError
faulthandler.dump_traceback_later(30, exit=True)
def held(opened, how): raise OSError("somebody holds it")
shared_memory.fcntl.flock = held
made = shared_memory.SharedMemoryTransport(Path(sys.argv[1]))
try:
    made._read(Ticket("shared-memory", shared_memory.PREFIX + "c" * 32, "", 1, "", 0))
except TransferError:
    print("refused")
"""


def test_what_a_killed_process_offered_is_removed_by_the_next_one(tmp_path: Path, blocks: PrefixBlocks) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        other = SharedMemoryTransport(tmp_path)
        assert left_in(tmp_path) == [name]  # it lives: nobody touches what it offers
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        other.sweep()
        assert left_in(tmp_path) == []
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()


def test_sweeping_leaves_alone_what_is_not_ours_or_not_finished(tmp_path: Path) -> None:
    keep = ["other", f"{UNFINISHED}new"]
    for name in [*keep, f"{PREFIX}{'0' * 32}", f"{UNFINISHED}old"]:
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / f"{UNFINISHED}old", (1, 1))
    SharedMemoryTransport(tmp_path)
    assert left_in(tmp_path) == sorted(keep)


def test_a_pipe_by_the_name_of_a_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Anybody may make one in a folder that all share."""
    os.mkfifo(tmp_path / f"{PREFIX}{'c' * 32}")
    ended = subprocess.run([sys.executable, "-c", PIPED, str(tmp_path)], timeout=60, capture_output=True, text=True)
    assert ended.stdout == "refused\n", ended.stderr


def test_a_ticket_names_files_of_blocks_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / f"{PREFIX}{'a' * 32}").symlink_to(tmp_path / "secret")
    made = SharedMemoryTransport(tmp_path)
    for address in ("secret", "../secret", "/etc/passwd", f"{PREFIX}{'a' * 32}", f"{PREFIX}{'b' * 32}"):
        with pytest.raises(TransferError):
            made._read(Ticket("shared-memory", address, "", 1, "", 0))


def test_without_room_nothing_is_left(tmp_path: Path, blocks: PrefixBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SharedMemoryTransport(tmp_path)

    def full(opened: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "write", full)
    with pytest.raises(TransferError, match="do not fit"):
        asyncio.run(made.offer(blocks))
    assert left_in(tmp_path) == []


def test_an_offer_that_is_broken_off_leaves_nothing(tmp_path: Path, blocks: PrefixBlocks) -> None:
    async def run() -> None:
        made = SharedMemoryTransport(tmp_path)
        offering = asyncio.ensure_future(made.offer(blocks))
        await asyncio.sleep(0)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering

    asyncio.run(run())  # which waits for the thread
    assert left_in(tmp_path) == []


def test_the_folder_for_shared_memory_is_one_to_write_to() -> None:
    folder = shared_memory.memory_folder()
    with open(folder / f"paceline-test-{os.getpid()}", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.unlink(file.name)


# ------------------------------------------------------------------ TCP

def test_without_the_token_nothing_comes(blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source = TcpTransport(TOKEN)
        await source.start()
        ticket = await source.offer(blocks)
        with pytest.raises(TransferError, match="another token"):
            await TcpTransport("a guess").fetch(ticket)
        assert same(await TcpTransport(TOKEN).fetch(ticket), blocks)
        source.close()

    asyncio.run(run())
    with pytest.raises(ConfigError, match="token"):
        TcpTransport("")


async def _stranger(answer: bytes) -> tuple[asyncio.Server, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        if answer:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(("answer", "said"), [
    (b"", "broke"), (b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 100, "another protocol"), (b"short", "broke"),
    (tcp.GREETING + b"n" * 32 + b"too little", "sent 10 of"), (tcp.GREETING + b"n" * 32 + b"x" * 5000, "checksum"),
])
def test_whoever_answers_instead_gets_nothing_believed(answer: bytes, said: str) -> None:
    async def run() -> None:
        server, address = await _stranger(answer)
        with pytest.raises(TransferError, match=said):
            await TcpTransport(TOKEN, stall_s=0.3).fetch(Ticket("tcp", address, "k" * 32, 5000, "0" * 64, 8))
        server.close()

    asyncio.run(run())


def test_nobody_listens_or_the_address_is_none() -> None:
    for address in ("127.0.0.1:1", "nonsense", "127.0.0.1:x"):
        with pytest.raises(TransferError, match="no connection"):
            asyncio.run(TcpTransport(TOKEN, stall_s=5.0).fetch(Ticket("tcp", address, "k" * 32, 5, "0", 8)))


def test_clients_that_say_nothing_or_nonsense_cost_nobody_anything(blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source = TcpTransport(TOKEN, stall_s=0.3)
        await source.start()
        ticket = await source.offer(blocks)
        host, _, port = ticket.address.partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\xff" * 64)
        assert same(await TcpTransport(TOKEN).fetch(ticket), blocks)
        while source._connections:
            await asyncio.sleep(0.02)
        for _, one in silent:
            one.close()
        writer.close()
        source.close()

    asyncio.run(run())


def test_who_reads_nothing_keeps_no_connection(blocks: PrefixBlocks) -> None:
    """Not even who has the token."""
    async def run() -> None:
        source = TcpTransport(TOKEN, stall_s=0.2)
        await source.start()
        ticket = await source.offer(blocks)
        source._offers[ticket.key] = [memoryview(bytes(64 << 20))]
        opened: list[asyncio.StreamWriter] = []
        answer = source._answer

        async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(writer)
            await answer(reader, writer)

        source._answer = noted  # type: ignore[method-assign]
        host, _, port = ticket.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        nonce = (await reader.readexactly(len(tcp.GREETING) + tcp.NONCE))[len(tcp.GREETING):]
        writer.write(ticket.key.encode() + tcp.proof(TOKEN, nonce, ticket.key))
        async with asyncio.timeout(20):
            while not opened or opened[0].transport.get_write_buffer_size() or source._connections:
                await asyncio.sleep(0.02)
        writer.close()
        source.close()

    asyncio.run(run())


def test_who_does_not_listen_cannot_offer(blocks: PrefixBlocks) -> None:
    with pytest.raises(TransferError, match="start"):
        asyncio.run(TcpTransport(TOKEN).offer(blocks))
    with pytest.raises(ConfigError, match="Cannot listen"):
        asyncio.run(TcpTransport(TOKEN, "203.0.113.1").start())
