"""Sampled: what a device sampled for a group, as the host reads it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.speculation.stats import Round
from paceline.speculation.verify import Verdict


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens, one after the other; none: the group samples nothing. A negative one (EMPTY or NAN) says why there is
    none; those after it mean nothing."""

    tokens: list[int]
    scores: Seq[NDArray[np.int32]] | None = None
    """A row for each token (sampling.logprobs.unpacked), where somebody in the step asked."""
    verdict: Verdict | None = None
    """What a group's draft came to, its accepted path moved into place; `tokens` are the verdict's."""
    chosen: Seq[int] = ()
    """Of a draft: what the target samples after each of its rows."""
    rounds: Seq[Round] = ()
    """Where the device drafts by itself: what each time came to. `tokens` are those of all of them."""
