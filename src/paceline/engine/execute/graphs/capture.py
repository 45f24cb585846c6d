"""What is launched on a device, captured once and replayed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from paceline.kernels.low_rank import AdapterSlots

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_COLLECTOR = threading.Lock()
"""Held while the process's garbage collector stands still."""


class GraphCapture:
    """Captures what is launched on a device. On a CPU, where Triton is interpreted, nothing is captured and the same
    launches are made each time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        self._pool: Any = None
        self._alive: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Those captured into the pool that somebody can still replay."""
        self.count = 0
        """Captures so far, those that broke included: what ran meanwhile took as long as they did."""

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Runs `launch` once, then keeps what it launched. What that reads and writes must lie where it lay, so the
        caller keeps every tensor that `launch` did not make itself. (Not `launch`: it knows who keeps the graph, and
        neither would go before a garbage collection.)"""
        self.count += 1
        if self.device.type != "cuda":
            launch()
            return launch
        if self._stream is None:
            # One for all captures: memory that one has used is free for the next on the same stream only.
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        if not self._alive:  # a pool goes with the last of its graphs, and nothing can be captured into it after that
            self._pool = torch.cuda.graph_pool_handle()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                launch()  # what this compiles must not be compiled inside a capture
                torch.cuda.synchronize(self.device)
                with nothing_collected():
                    self._record(graph, launch)
        finally:  # without memory too: what was launched shares scratch with whatever runs instead
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._alive.add(graph)
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, launch: Callable[[], None]) -> None:
        # Not through torch.cuda.graph, which collects garbage and empties the memory cache each time. What other
        # threads do meanwhile, another engine's among them, is no concern of this capture.
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            launch()
        except BaseException:
            with suppress(RuntimeError):  # what broke the capture is what matters
                self._end(graph)
            raise
        self._end(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError as problem:
            self._stream, self._alive = None, WeakSet()  # the pool of a capture that broke stays open: leave it
            if "out of memory" in str(problem):  # making a graph of what was captured takes memory too
                raise torch.OutOfMemoryError(str(problem)) from problem
            raise


class CapturedSteps(dict[tuple[K, int], T]):
    """What was captured, by what it has room for and by the layout of the adapters that it reads; 0: it reads none, and
    costs nothing for them. What was captured for an older layout is let go."""

    def __init__(self, adapters: AdapterSlots) -> None:
        super().__init__()
        self._adapters = adapters

    def find(self, key: K, with_adapters: bool, capture: Callable[[], T]) -> T:
        """`with_adapters`: some row may have one."""
        layout = self._adapters.layout if with_adapters else 0
        if (key, layout) not in self:
            for stale in [known for known in self if known[1] not in (0, self._adapters.layout)]:
                del self[stale]
            self[key, layout] = capture()
        return self[key, layout]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Without garbage collections: an engine that is collected frees its graphs, which breaks a capture under way."""
    with _COLLECTOR:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()
