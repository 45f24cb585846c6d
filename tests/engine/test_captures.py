"""A capture is not broken by what the process does meanwhile, and a broken one does not break those behind it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from paceline.engine.execute.graphs.capture import GraphCapture, nothing_collected


class FakeGraph:
    """As CUDA's: garbage that holds a graph may not be collected while another is captured, and the memory pool of a
    capture that broke stays open."""

    open_pools: set[Any]
    capturing = 0
    broken = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        if pool in FakeGraph.open_pools:
            raise RuntimeError("already recording")
        FakeGraph.open_pools.add(pool)
        FakeGraph.capturing += 1
        self.pool = pool

    def capture_end(self) -> None:
        FakeGraph.capturing -= 1
        if FakeGraph.broken:
            FakeGraph.broken = False
            raise RuntimeError("a previous error during capture")
        FakeGraph.open_pools.remove(self.pool)

    def replay(self) -> None: ...

    def __del__(self) -> None:
        FakeGraph.broken |= FakeGraph.capturing > 0


class FakeStream:
    def __init__(self, *_: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> GraphCapture:
    FakeGraph.open_pools, FakeGraph.capturing, FakeGraph.broken = set(), 0, False
    for name, fake in {"Stream": FakeStream, "CUDAGraph": FakeGraph, "graph_pool_handle": object,
                       "current_stream": FakeStream, "stream": nullcontext, "synchronize": lambda *_: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return GraphCapture(torch.device("cuda"))


def leave_an_engine_behind() -> None:
    """One that only a collection frees."""
    engine: list[Any] = [FakeGraph()]
    engine.append(engine)


def busy() -> None:
    """Enough objects for a collection of the youngest."""
    assert len([[] for _ in range(20 * gc.get_threshold()[0])]) > 0


def test_garbage_is_not_collected_while_something_is_captured(graphs: GraphCapture) -> None:
    def launch() -> None:
        if FakeGraph.capturing:
            leave_an_engine_behind()
        busy()

    gc.collect()
    assert gc.isenabled()
    graphs.capture(launch)
    assert gc.isenabled()
    busy()
    gc.collect()
    graphs.capture(busy)


def test_a_broken_capture_leaves_the_next_one_a_pool_of_its_own(graphs: GraphCapture) -> None:
    def launch() -> None:
        FakeGraph.broken = FakeGraph.capturing > 0

    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(launch)
    graphs.capture(lambda: None)
    assert gc.isenabled()


def test_a_capture_that_cannot_begin_leaves_the_next_one_a_pool_too(graphs: GraphCapture,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    begin = FakeGraph.capture_begin

    def broken(graph: FakeGraph, **given: Any) -> None:
        begin(graph, **given)
        FakeGraph.broken = True
        raise RuntimeError("not now")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="not now"):
        patch.setattr(FakeGraph, "capture_begin", broken)
        graphs.capture(lambda: None)
    graphs.capture(lambda: None)


def test_no_memory_for_a_graph_is_a_lack_of_memory(graphs: GraphCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA says it in an error of another kind."""
    def full(graph: FakeGraph) -> None:
        FakeGraph.capturing -= 1
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(FakeGraph, "capture_end", full)
        graphs.capture(lambda: None)
    graphs.capture(lambda: None)


def test_what_broke_a_capture_is_what_is_told(graphs: GraphCapture) -> None:
    def launch() -> None:
        if FakeGraph.capturing:
            FakeGraph.broken = True
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        graphs.capture(launch)
    graphs.capture(lambda: None)


def test_captures_of_one_engine_share_a_pool_also_behind_one_without_memory(graphs: GraphCapture) -> None:
    pools = []

    def launch() -> None:
        pools.extend(FakeGraph.open_pools)

    def without_memory() -> None:
        launch()
        if FakeGraph.capturing:
            raise torch.OutOfMemoryError

    kept = [graphs.capture(launch)]
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(without_memory)
    kept.append(graphs.capture(launch))
    assert len(pools) == 3 and len(set(pools)) == 1


def test_where_nothing_is_left_that_was_captured_the_next_one_gets_another_pool(graphs: GraphCapture) -> None:
    """CUDA gives a pool up with the last of its graphs, and takes no other into it; also that of a first capture which
    found no memory."""
    pools: list[Any] = []

    def launch() -> None:
        pools.extend(FakeGraph.open_pools)

    def without_memory() -> None:
        launch()
        if FakeGraph.capturing:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture(without_memory)
    kept = [graphs.capture(launch), graphs.capture(launch)]
    kept.pop()
    kept.append(graphs.capture(launch))
    kept.clear()
    kept.append(graphs.capture(launch))
    assert len({id(pool) for pool in pools}) == 3 and [pool is pools[1] for pool in pools] == [
        False, True, True, True, False]


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with nothing_collected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), nothing_collected():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_engine_that_becomes_garbage_does_not_break_a_capture() -> None:
    device = torch.device("cuda")
    x = torch.zeros(4, device=device)

    def add() -> None:
        x.add_(1)

    old: list[Any] = [GraphCapture(device).capture(add)]
    old.append(old)
    engines = [old]
    del old

    def launch() -> None:
        add()
        if torch.cuda.is_current_stream_capturing():
            engines.clear()
            busy()

    again = GraphCapture(device).capture(launch)
    again()
    torch.cuda.synchronize()
    assert x.tolist() == [3.0] * 4
