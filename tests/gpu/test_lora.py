"""The check of adapters on a card, run on the device path of the CPU."""

from __future__ import annotations

import pytest

import lora
from paceline.models.load.adapters import PeftAdapter


def checked() -> dict[str, object]:
    return lora.check("cpu", texts=1, requests=3, tokens=3, dtypes=("float32",), kernels="stepped")


def test_it_passes_here() -> None:
    result = checked()
    assert result["failures"] == []


def test_it_finds_steps_that_are_not_repeated() -> None:
    result = lora.check("cpu", texts=1, requests=2, tokens=1, dtypes=("float32",), kernels="stepped")
    assert "steps repeated with adapters, plain, float32: 0" in str(result["failures"])


def test_it_finds_an_adapter_that_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, model: object) -> PeftAdapter:
        made = real(name, model)
        return PeftAdapter(made.path, made.revision, made.targets,
                           {module: type(pair)(pair.a, pair.b, 0.0) for module, pair in made.pairs.items()})

    real = lora.random_adapter
    calls = iter([real, nothing, nothing])
    monkeypatch.setattr(lora, "random_adapter", lambda name, model: next(calls)(name, model))
    assert "merged weights" in str(lora.check("cpu", texts=1, dtypes=(), kernels="stepped")["failures"])
