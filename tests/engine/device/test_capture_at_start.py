"""Captured before the first request: every size once, with progress; where memory ends the rest waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.device.on_device import PROMPTS, executor_of, made, on_host
from paceline import LLM, SamplingParams

OPTIONS: dict[str, Any] = {"max_num_seqs": 3, "max_batch_tokens": 32}


class Captures:
    """In place of a device's: counts, and has memory for so many."""

    def __init__(self, llm: LLM, room: int = 1000) -> None:
        self.count = 0
        self.room = room
        executor_of(llm).graphs.decode._graphs.capture = self.take  # shared with the prompts' graphs

    def take(self, launch: Any) -> Any:
        if self.count >= self.room:
            raise torch.OutOfMemoryError("no memory")
        self.count += 1
        return launch


def test_every_size_is_captured_once_and_reported() -> None:
    llm = made(**OPTIONS)
    captures = Captures(llm)
    heard: list[tuple[str, int, int | None]] = []
    count = llm.engine.capture(lambda *news: heard.append(news))
    # Decoding 1, 2 and 3 sequences, plain and truncated, without drafts and with some in three numbers of rows; prompts
    # of up to 16 and 32 rows; samples, plain and truncated.
    assert count == len(heard) - 1 and captures.count == 3 * 2 * 4 + 2 + 2
    assert heard[0] == ("capture", 0, count) and heard[-1] == ("capture", count, count)
    assert llm.engine.capture() == count and captures.count == 3 * 2 * 4 + 2 + 2, "nothing is captured twice"


def test_where_memory_ends_the_rest_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    llm = made(**OPTIONS)
    captures = Captures(llm, room=3)
    assert llm.engine.capture() < 10 and captures.count == 3
    assert "no memory to capture more than" in caplog.text


def test_other_kernels_capture_nothing() -> None:
    llm = on_host()
    assert llm.engine.capture() == 0
    out = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
    assert len(out.outputs[0].token_ids) == 2


def test_what_was_captured_at_the_start_is_what_runs() -> None:
    llm = made(**OPTIONS)
    llm.engine.capture()
    captures = Captures(llm)
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
    found = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]
    assert found == [out.outputs[0].token_ids for out in on_host().generate(PROMPTS, params)]
    assert captures.count == 0
