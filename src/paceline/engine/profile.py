"""Profiles: what steps take, kept on disk for the next time that the same model runs on the same machine."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from paceline.hub.cache import cache_dir
from paceline.kernels.cpu.library import load
from paceline.speculation.step_cost import StepCost

LARGEST = 1 << 20
"""Bytes of a profile; a larger file is none."""


def machine(device: torch.device) -> str:
    """What runs the steps: a card's name, or the processor's."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("model name", "CPU part")):
                return f"{platform.machine()} {line.split(':', 1)[1].strip()}"
    return f"{platform.machine()} {platform.processor()}"


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return ""


def _build() -> str:
    """Of the native kernels, of which a version has many where somebody works on it: each has step times of its own."""
    native = load()
    with suppress(OSError, AttributeError, TypeError):
        return sha256(Path(native.__file__).read_bytes()).hexdigest()[:16]  # type: ignore[union-attr]
    return ""


class Profile:
    """One file, found by everything that step times depend on. Without it, with a broken one or one that cannot be
    written, the engine measures anew."""

    def __init__(self, **facts: Any) -> None:
        """`facts`: of model and machine."""
        self.facts = {"version": _version(), "build": _build(), "cores": os.cpu_count()} | {
            name: str(one) for name, one in facts.items()}
        self._name = sha256(json.dumps(self.facts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    @property
    def path(self) -> Path:
        """Raises RuntimeError for a user without a home."""
        return cache_dir().parent / "profiles" / f"{self._name}.json"

    def load(self, cost: StepCost) -> bool:
        """Whether there was one, which `cost` knows now."""
        try:
            path = self.path
            if path.stat().st_size > LARGEST:
                return False
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["facts"] != json.loads(json.dumps(self.facts, default=str)):
                return False
            cost.restore(found["cost"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError):
            return False
        return True

    def save(self, cost: StepCost) -> None:
        with suppress(OSError, RuntimeError):
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(f".{os.getpid()}")
            try:
                written.write_text(json.dumps({"facts": self.facts, "cost": cost.as_dict()}, indent=1, default=str),
                                   encoding="utf-8")
                written.replace(path)
            finally:
                written.unlink(missing_ok=True)
