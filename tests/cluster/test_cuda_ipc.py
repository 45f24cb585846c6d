"""Blocks between processes on one card."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import Any

import pytest
import torch

from cluster.test_exchange import PROMPT, blocks_of
from paceline.cluster.transfer.cuda_ipc import CudaIpcTransport
from paceline.engine.exchange import PrefixBlocks
from paceline.errors import TransferError


def test_what_lies_elsewhere_is_refused() -> None:
    with pytest.raises(TransferError, match="on a card"):
        asyncio.run(CudaIpcTransport().offer(blocks_of()))


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
