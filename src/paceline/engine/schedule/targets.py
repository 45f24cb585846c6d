"""Targets for first tokens: whether somebody's would be late if drafts had their rows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.engine.schedule.pace import Pace
from paceline.engine.schedule.sequence import Sequence

DRAFTS = 2.0
"""Times as long that rows which decode may take with drafts as without."""


def any_late(prompts: Iterable[Sequence], pace: Pace, decoding: int, now: float) -> bool:
    """Whether of these, in the order in which they are served, one would get its first token after its target while so
    many decode beside it with drafts. One whose target has passed has nothing left to lose."""
    beside = pace.cost(decoding, decoding * pace.cost.mean_context) if decoding and pace.cost.measured else 0.0
    room = pace.left_for_prompts(decoding, decoding > 0)
    seconds = 0.0
    for seq in prompts:
        seconds += pace.prompt_seconds(seq.computed, len(seq.tokens) - seq.computed)
        target = seq.request.target_ttft_s
        if target is None or seq.output_len or now >= seq.request.arrival + target:
            continue
        steps = max(1, math.ceil(seconds / room))
        if now + seconds + DRAFTS * steps * beside > seq.request.arrival + target:
            return True
    return False
