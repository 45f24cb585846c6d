"""Steps with an adapter are launched kernel by kernel and the host samples; those without are replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from adapters.adapter_files import ATTENTION, MLP, factors, shapes_of, write_adapter
from engine.device.on_device import executor_of
from engine.tiny import tiny_llm, tiny_model
from paceline import SamplingParams


def test_steps_with_an_adapter_are_launched_and_others_replayed(tmp_path: Path) -> None:
    model, prompt = tiny_model(), [5, 8, 2]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    llm = tiny_llm(model, kernels="stepped")
    llm.load_adapter("own", str(write_adapter(tmp_path, factors(shapes_of(model, ATTENTION + MLP), "device"))))
    executor, calls = executor_of(llm), Counter[str]()

    def counted(owner: Any, name: str, kind: str) -> None:
        call = getattr(owner, name)

        def noted(*given: Any, **more: Any) -> Any:
            calls[kind] += 1
            return call(*given, **more)

        setattr(owner, name, noted)

    counted(executor._runner, "forward", "launched")
    counted(executor.graphs.prefill, "launch", "replayed")
    counted(executor.graphs.decode, "launch", "replayed")
    base = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert calls["replayed"] and not calls["launched"]
    calls.clear()
    outs = llm.generate([prompt, prompt], params, adapter=[None, "own"])
    assert calls == {"launched": 5}
    assert outs[0].outputs[0].token_ids == base
    reference = tiny_llm(model, kernels="reference")
    reference.engine.adapters = llm.engine.adapters
    own = reference.generate([prompt], params, adapter="own")[0].outputs[0].token_ids
    assert outs[1].outputs[0].token_ids == own != base
