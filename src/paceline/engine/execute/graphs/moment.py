"""Moment: a point among what is launched on a device, whose time is known when the device has come to it."""

from __future__ import annotations

import time
from typing import Any

import torch


class Moment:
    """Now, for what is launched from here on. A CPU has come to it at once."""

    __slots__ = ("_at", "_event")

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._at = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._at = time.perf_counter()

    def wait(self) -> None:
        """Until the device has come to it."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def passed(self) -> bool:
        """Whether the device has come to it."""
        return self._event is None or bool(self._event.query())

    def until(self, later: Moment) -> float:
        """Seconds of the device, which has come to both."""
        if self._event is None:
            return later._at - self._at
        return float(self._event.elapsed_time(later._event)) / 1000
