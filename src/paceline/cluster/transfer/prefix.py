"""Whole beginnings of texts out of a running engine and into one, a few blocks between any two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from paceline.async_llm import AsyncLLM
from paceline.engine.core import Engine
from paceline.engine.exchange import PrefixBlocks, joined

Answer = TypeVar("Answer")


async def export_prefix(llm: AsyncLLM, tokens: Sequence[int], scope: str, first: int = 0, *,
                        on_device: bool = False) -> PrefixBlocks | None:
    """What the engine's cache holds of these tokens from block `first` on; None: nothing."""
    parts: list[PrefixBlocks] = []
    while True:
        ask = partial(_export, tokens=tokens, scope=scope, first=first, on_device=on_device)
        part = await _between_steps(llm, ask)
        if not any(part.pieces):
            return await asyncio.to_thread(joined, parts) if parts else None
        parts.append(part)
        first = len(part.tokens) // part.block_size


async def import_prefix(llm: AsyncLLM, blocks: PrefixBlocks, tokens: Sequence[int], scope: str) -> int:
    """Have the engine's cache hold these blocks, as far as there is room; how many pieces were new there. Raises
    TransferError where they are not what the engine would have computed of these tokens."""
    count = 0
    for part in blocks.parts():
        count += await _between_steps(llm, partial(_import, blocks=part, tokens=tokens, scope=scope))
    return count


def _export(engine: Engine, *, tokens: Sequence[int], scope: str, first: int, on_device: bool) -> PrefixBlocks | None:
    return engine.exchange.export_prefix(tokens, scope, first, on_device=on_device)


def _import(engine: Engine, *, blocks: PrefixBlocks, tokens: Sequence[int], scope: str) -> int | None:
    return engine.exchange.import_prefix(blocks, tokens, scope)


async def _between_steps(llm: AsyncLLM, question: Callable[[Engine], Answer | None]) -> Answer:
    """Ask until it is answered: between some steps the cache cannot be touched."""
    while True:
        answer = await llm.ask(question)
        if answer is not None:
            return answer
        await asyncio.sleep(0.001)
