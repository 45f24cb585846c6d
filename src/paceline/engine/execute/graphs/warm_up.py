"""Capturing steps before the first request comes, so that none waits for it. What is not captured here is when it is
first needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from paceline.engine.execute.graphs.memory import Use
from paceline.engine.execute.graphs.step_graphs import StepGraphs

log = logging.getLogger("paceline.engine")
Progress = Callable[[str, int, int | None], None]


@torch.inference_mode()
def capture_steps(graphs: StepGraphs, most_rows: int, progress: Progress | None = None) -> int:
    """Decoding for every number of sequences, prompts and mixes of up to `most_rows` rows; how many steps were
    captured. Where memory ends the rest are left out."""
    started = time.perf_counter()
    captures = [*graphs.decode.captures(), *graphs.prefill.captures(most_rows)]
    for done, capture in enumerate(captures):
        if progress is not None:
            progress("capture", done, len(captures))
        # Not final: smaller steps, or those that are needed, may still find memory.
        if not graphs.memory.allows(Use.PREFILL, capture, final=False):
            log.warning("no memory to capture more than %d of %d steps: give the cache fewer kv_blocks", done,
                        len(captures))
            return done
    if progress is not None:
        progress("capture", len(captures), len(captures))
    log.info("%d steps captured in %.1f s", len(captures), time.perf_counter() - started)
    return len(captures)
