"""Triton's interpreter, several times faster: it need not prepare its language anew for every call in a kernel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest


class _Kept:
    def restore(self) -> None:
        """What was prepared stays until the kernel ends."""


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Prepare the language once per kernel and module instead of once per call. The result of a call is the same."""
    from triton.runtime import interpreter

    prepare, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def once(function):
        if id(function.__globals__) in prepared:
            return _Kept()
        prepared.add(id(function.__globals__))
        return prepare(function)

    def fresh(self, *args, **kwargs):
        prepared.clear()
        # Numbers that do not matter (masked ones) overflow or are not numbers, as they do on the device.
        with np.errstate(all="ignore"):
            return run(self, *args, **kwargs)

    # Each addition and multiplication is otherwise done a second time in 64 bits, to see whether it overflows.
    lenient = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", lenient)
    patch.setattr(interpreter, "_patch_lang", once)
    patch.setattr(interpreter.GridExecutor, "__call__", fresh)
