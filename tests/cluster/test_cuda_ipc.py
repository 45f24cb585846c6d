"""Blocks between processes on one card."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.test_exchange import PROMPT, blocks_of
from paceline.cluster.transfer import cuda_ipc
from paceline.cluster.transfer.cuda_ipc import Claim, CudaIpcTransport, claimed
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError


def test_what_lies_elsewhere_is_refused() -> None:
    with pytest.raises(TransferError, match="on a card"):
        asyncio.run(CudaIpcTransport().offer(blocks_of()))


def test_an_offer_is_opened_by_one_or_let_go_by_its_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_ipc, "memory_folder", lambda: tmp_path)
    first, second = "a" * 32, "b" * 32
    taken, forgotten = Claim(first), Claim(second)
    assert len(list(tmp_path.iterdir())) == 2
    assert claimed(first) and not claimed(first)
    assert not taken.withdrawn(), "somebody has it: torch hears from there"
    assert forgotten.withdrawn()
    assert not claimed(second), "too late"
    assert not claimed("../" + first) and not claimed("c" * 32)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_what_nobody_opens_is_free_when_the_lease_ends() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    size = 64 << 20

    async def run() -> None:
        transport = CudaIpcTransport()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            blocks = PrefixBlocks({}, 8, ((),), "", tuple(PROMPT[:56]), ((),), (
                torch.zeros(size // 64, 64, dtype=torch.uint8, device="cuda"),))
            ticket = await transport.offer(blocks, lease_s=0.05)
            del blocks
            while len(transport._leases):
                await asyncio.sleep(0.01)
            with pytest.raises(TransferError, match="lease has ended"):
                await transport.fetch(ticket)
        assert torch.cuda.memory_allocated() < before + size

    asyncio.run(run())


def _read(ticket: Any, answer: Any) -> None:
    """In another process."""
    blocks = asyncio.run(CudaIpcTransport().fetch(ticket))
    answer.put([rows.cpu().numpy().tobytes() for rows in blocks.data])
    del blocks


@pytest.mark.gpu
def test_another_process_reads_what_lies_on_the_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data = (torch.arange(7 * 96, dtype=torch.int32, device="cuda").to(torch.uint8).view(7, 96),)
    blocks = PrefixBlocks({}, 8, ((),), "", tuple(PROMPT[:56]), ((),), data)

    async def run() -> None:
        transport = CudaIpcTransport()
        ticket = await transport.offer(blocks)
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        reader = context.Process(target=_read, args=(ticket, answer))
        reader.start()
        assert await asyncio.to_thread(answer.get, timeout=120) == [data[0].cpu().numpy().tobytes()]
        reader.join()
        transport.withdraw(ticket)
        assert not len(transport._leases)

    asyncio.run(run())
