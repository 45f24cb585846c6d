"""How late the event loop is: whoever waits for it waits at least that long."""

from __future__ import annotations

import asyncio
from typing import Any

PERIOD_S = 0.02


async def watch(histogram: Any) -> None:
    """Observe, fifty times a second, how late a timer fires. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        histogram.observe(max(0.0, loop.time() - due))
