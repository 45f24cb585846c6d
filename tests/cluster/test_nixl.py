"""The nixl transport against a stand-in made from nixl's published interface: nothing here has seen the real one."""

from __future__ import annotations

import asyncio
import ctypes
import pickle
import sys
import types
from typing import Any

import pytest
import torch

from cluster.test_exchange import blocks_of
from cluster.test_transports import same
from paceline.cluster.transfer.nixl import NixlTransport
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import ConfigError, TransferError

AGENTS: dict[str, Any] = {}


class Agent:
    """nixl_agent: reads by address, out of memory that its owner has registered."""

    def __init__(self, agent_name: str, nixl_conf: Any = None) -> None:
        self.name = agent_name
        self.registered: list[list[tuple[int, int]]] = []
        self.remote: set[str] = set()
        self.handles = 0
        self.end = "DONE"
        AGENTS[agent_name] = self

    def register_memory(self, reg_list: list[torch.Tensor]) -> Any:
        self.registered.append(self.get_xfer_descs(reg_list))
        return self.registered[-1]

    def deregister_memory(self, dereg_list: Any) -> None:
        self.registered.remove(dereg_list)

    def get_xfer_descs(self, descs: list[torch.Tensor]) -> list[tuple[int, int]]:
        return [(one.data_ptr(), one.numel()) for one in descs]

    def get_serialized_descs(self, descs: Any) -> bytes:
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized: bytes) -> Any:
        return pickle.loads(serialized)

    def get_agent_metadata(self) -> bytes:
        return pickle.dumps((self.name, self.registered))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, _ = pickle.loads(metadata)
        self.remote.add(name)
        return str(name).encode()

    def remove_remote_agent(self, agent: str) -> None:
        self.remote.remove(agent)

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str,
                        notif_msg: bytes = b"") -> Any:
        assert operation == "READ" and remote_agent in self.remote
        self.handles += 1
        return {"pairs": list(zip(local_descs, remote_descs, strict=True)), "of": remote_agent, "looks": 0}

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        handle["looks"] += 1
        if handle["looks"] < 3 or self.end == "PROC":
            return "PROC"
        known = [area for areas in AGENTS[handle["of"]].registered for area in areas]
        for (local, size), remote in handle["pairs"]:
            if remote not in known or remote[1] != size:
                return "ERR"
            ctypes.memmove(local, remote[0], size)
            if self.end == "flips":
                ctypes.memset(local, 0, 1)
        return "DONE" if self.end == "flips" else self.end

    def release_xfer_handle(self, handle: Any) -> None:
        self.handles -= 1


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("nixl._api")
    module.nixl_agent, module.nixl_agent_config = Agent, lambda: None
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)


@pytest.fixture(scope="module")
def blocks() -> PrefixBlocks:
    return blocks_of()


def nothing_left(*transports: NixlTransport) -> bool:
    return not any(one._agent.registered or one._agent.remote or one._agent.handles for one in transports)


@pytest.mark.usefixtures("nixl")
def test_blocks_are_read_where_they_are_offered(blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source, target = NixlTransport(), NixlTransport()
        ticket = await source.offer(blocks)
        assert same(await target.fetch(pickle.loads(pickle.dumps(ticket))), blocks)
        source.withdraw(ticket)
        with pytest.raises(TransferError, match="ERR"):
            await target.fetch(ticket)
        await source.offer(blocks, lease_s=0.0)
        await asyncio.sleep(0.05)
        assert nothing_left(source, target)

    asyncio.run(run())


@pytest.mark.usefixtures("nixl")
def test_a_read_that_is_over_leaves_others_of_the_same_worker_alone(blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source, target = NixlTransport(), NixlTransport()
        ticket, checked = await source.offer(blocks), target._agent.check_xfer_state

        def check(handle: Any) -> str:
            assert handle["of"] in target._agent.remote
            return str(checked(handle))

        target._agent.check_xfer_state = check
        first = asyncio.ensure_future(target.fetch(ticket))
        await asyncio.sleep(0.002)
        for one in await asyncio.gather(first, *(target.fetch(ticket) for _ in range(3))):
            assert same(one, blocks)
        source.close()
        assert nothing_left(source, target)

    asyncio.run(run())


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize(("end", "said"), [("ERR", "ERR"), ("flips", "checksum"), ("PROC", "TimeoutError")])
def test_reads_that_fail_leave_nothing(end: str, said: str, blocks: PrefixBlocks) -> None:
    async def run() -> None:
        source, target = NixlTransport(), NixlTransport(patience_s=0.1)
        target._agent.end = end
        ticket = await source.offer(blocks)
        with pytest.raises(TransferError, match=said):
            await target.fetch(ticket)
        source.close()
        assert nothing_left(source, target)

    asyncio.run(run())


def test_without_it_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match="pip install nixl"):
        NixlTransport()
