"""kernel_checks.py: what fails or raises is named, and ends the command with 1."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import kernel_checks


def broken() -> str:
    raise ValueError("no such shape")


def test_every_check_is_a_row_and_every_problem_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [("fine", lambda: ""), ("far", lambda: "off by 1.00e+00"), ("broken", broken)]
    monkeypatch.setattr(kernel_checks, "_checks", lambda device: iter(made))
    found = kernel_checks.run(torch.device("cpu"))
    assert [row["case"] for row in found["rows"]] == ["fine", "far", "broken"]
    assert [row["case"] for row in kernel_checks.run(torch.device("cpu"), "f")["rows"]] == ["fine", "far"]
    first, second = found["failures"]
    assert first == "far: off by 1.00e+00" and second.startswith("broken: ValueError: no such shape")


def test_a_failure_is_the_status_of_the_command(monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_checks.py"])
    monkeypatch.setattr(kernel_checks.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel_checks, "run", lambda device, only: {
        "machine": {"cpu": "x", "cores": 1, "threads": 1, "torch": "0"}, "rows": [], "failures": ["far: off"]})
    with pytest.raises(SystemExit) as left:
        kernel_checks.main()
    assert left.value.code == 1 and "far: off" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_checks.py"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        kernel_checks.main()
