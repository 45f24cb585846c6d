"""What a captured step reads and writes stays where it lay for as long as the step can be replayed: a device knows
addresses alone, and would write there whoever has the memory by then."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.device.on_device import PROMPTS, executor_of, made
from engine.tiny import tiny_model
from paceline import SamplingParams
from speculation.trained_heads import random_head

TEXTS = [*PROMPTS, PROMPTS[2]]


class Touched(TorchDispatchMode):
    """The memory that operations touch and did not make themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, StorageWeakRef] = {}
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor): tensor for tensor in _tensors((args, kwargs))}
        if func is torch.ops.aten.lift_fresh.default:  # a constant: made here, though by no operation
            self._own |= given.keys()
        for key, tensor in given.items():
            if key not in self._own:
                self.found.setdefault(key, StorageWeakRef(tensor.untyped_storage()))
        out = func(*args, **(kwargs or {}))
        self._own |= {_key(tensor) for tensor in _tensors(out)} - given.keys() - self.found.keys()
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Captured:
    """As a device's graph: knows where memory lies, and holds none of it once it is `let_go`."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self.launch: Callable[[], None] | None = launch
        with Touched() as touched:
            launch()
        self.memory = list(touched.found.values())

    def __call__(self) -> None:
        assert self.launch is not None
        self.launch()

    def let_go(self) -> None:
        self.launch = None


WISHES: list[Any] = [{"method": "ngram", "adaptive": False, "k": 3}, "suffix",
                     {"method": "suffix", "tree": True, "factor": 3.0}, {"method": "exit", "branches": [2, 2]}]


@pytest.mark.parametrize("kind", [None, "eagle3", "dspark"])
def test_steps_keep_the_memory_they_were_captured_with(kind: str | None) -> None:
    """`kind`: of a trained head that drafts in them."""
    trained, wishes = None, WISHES
    if kind is not None:
        trained = {"it": random_head(kind, tiny_model())}
        wishes = [{"method": kind, "adaptive": False, "k": 3}, None, {"method": kind}, "ngram"]
    llm = made(max_num_seqs=4, max_batch_tokens=16, trained=trained)
    known: list[ref[Captured]] = []

    def capture(launch: Callable[[], None]) -> Captured:
        one = Captured(launch)
        known.append(ref(one))
        return one

    executor_of(llm).graphs.decode._graphs.capture = capture  # shared with the prompts' and drafts' graphs
    if kind is None:
        llm.engine.capture()
    params = [SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0),
              SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, seed=1, repetition_penalty=1.3, top_k=9)]
    for one in params:
        llm.generate(TEXTS, one, speculation=wishes)
        llm.generate(TEXTS, one)
    gc.collect()
    captured = [one for weak in known if (one := weak()) is not None]  # those of draft models have gone with them
    assert len(captured) > (20 if kind is None else 5) and all(one.memory for one in captured)
    drafting = [shape for (shape, _), *_ in executor_of(llm).graphs.decode._captured if shape.heads]
    assert bool(drafting) == (kind is not None)
    for one in captured:
        one.let_go()
    gc.collect()
    lost = [sum(memory.expired() for memory in one.memory) for one in captured]
    assert not any(lost), f"{sum(map(bool, lost))} of {len(lost)} steps refer to memory that is free again"
