"""Decision: what one group of a step yielded, with what the scheduler need not know."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.engine.schedule.step import GroupResult
from paceline.errors import PacelineError
from paceline.speculation.stats import Provenance, Round
from paceline.speculation.tree import DraftTree

if TYPE_CHECKING:
    import torch

PLAIN, BONUS, CORRECTED = Provenance("plain"), Provenance("bonus"), Provenance("corrected")


@dataclass(slots=True)
class Decision(GroupResult):
    """What a group yielded, with what the scheduler need not know."""

    siblings: Seq[Decision] = ()
    error: PacelineError | None = None
    draft: DraftTree | None = None
    origins: Seq[Provenance] = (PLAIN,)
    """Where each token came from."""
    overlaps: Seq[float] = ()
    """Of drafts that were sampled (Verdict.overlaps)."""
    rounds: Seq[Round] = ()
    """Of a group for which the device drafted by itself, one for each time the step ran."""
    chosen: list[int] = field(default_factory=list)
    """Of a group drafted under the coupled rule: what the target samples after each of its rows. Under the others it
    stays empty: a drafter that knew these tokens could bend the text by what it does or does not propose."""
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Observation.hidden, of a group whose drafter reads it."""
