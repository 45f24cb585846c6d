"""`paceline verify`: bits of verify steps beside those of decode steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import write_model

from engine.tiny import tiny_engine, tiny_model
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.kernels import cpu
from paceline.watch.step_bits import BitsReport, verify_steps

POSITIONS = 10
NATIVE = pytest.mark.skipif(cpu.load() is None, reason="the native kernels are not built")


def report(shape: str = "llama", **options: Any) -> BitsReport:
    return verify_steps(tiny_engine(tiny_model(shape), **options), "tiny", POSITIONS, 3)


@pytest.mark.parametrize(("shape", "kernels"), [("llama", "stepped"), ("mistral", "reference")])
def test_exact_modes_hold_what_they_promise(shape: str, kernels: str) -> None:
    found = report(shape, kernels=kernels)
    assert found.promised and found.holds and not found.broken
    assert found.positions == found.equal >= POSITIONS * len(found.compared)
    assert "give the bits of decode steps" in found.verdict
    assert sum(one.accepted for one in found.compared) > 3 * POSITIONS, "verify steps were really used"
    assert all(one.kv_positions >= 8 for one in found.compared)


def test_a_mode_that_promises_nothing_is_judged_as_such() -> None:
    found = report(deterministic=False, kernels="eager")
    assert not found.promised and not found.broken
    assert found.holds or "need not give" in found.verdict


def test_rows_of_drafts_that_come_out_otherwise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    decide = engine.decider.decide

    def bent(step: Any, out: Any) -> Any:
        for group, first in zip(step.groups, out.first):
            if group.draft is not None:
                with torch.inference_mode():
                    out.logits[first + 1:first + len(group.tokens)] += torch.linspace(0, 1e-6, out.logits.shape[1])
        return decide(step, out)

    monkeypatch.setattr(engine.decider, "decide", bent)
    found = verify_steps(engine, "tiny", POSITIONS, 3)
    assert found.broken and "do NOT give" in found.verdict
    wrong = {one.name: one for one in found.compared if not one.holds}
    assert "verify, chain of 3" in wrong and "decode in company" not in wrong
    chain = wrong["verify, chain of 3"]
    assert chain.first_difference is not None and 0.0 < chain.largest_difference < 1e-5 and chain.kl < 1e-6


def test_a_cache_that_holds_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accepted path that is not moved into place."""
    engine = tiny_engine()
    monkeypatch.setattr(engine.cache, "compact", lambda *_: [])
    found = verify_steps(engine, "tiny", POSITIONS, 3)
    assert found.broken
    assert any(one.kv_equal < one.kv_positions for one in found.compared if "tree" in one.name)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--positions must be from 1 to"):
        verify_steps(tiny_engine(), "tiny", 5000, 4)
    with pytest.raises(ConfigError, match="takes at least 114: give a larger --max-model-len"):
        verify_steps(tiny_engine(max_model_len=64), "tiny", 1, 4)
    with pytest.raises(ConfigError, match="--rows must be from"):
        verify_steps(tiny_engine(), "tiny", 10, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_model(tmp_path))
    assert main(["verify", folder, "--deterministic", "--positions", "6", "--rows", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["holds"] and printed["promised"] and printed["equal"] == printed["positions"]
    assert main(["verify", folder, "--deterministic", "--positions", "4", "--rows", "1"]) == 0
    assert "Verify steps give the bits of decode steps" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("quantization", "said"), [
    pytest.param("int8", "weights in int8 from float32, cache in float32", marks=NATIVE),
    pytest.param("blocks", "weights in blocks from float32, cache in float32", marks=NATIVE),
    (None, "weights in float32, cache in float32")])
def test_the_weights_format_is_part_of_what_is_said(quantization: str | None, said: str, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Bits that hold in one format say nothing of another."""
    asked = [] if quantization is None else ["--quantization", quantization]
    main(["verify", str(write_model(tmp_path)), *asked, "--positions", "2", "--rows", "1", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["quantization"], printed["dtype"]) == (quantization, "float32")
    assert said in printed["verdict"]
