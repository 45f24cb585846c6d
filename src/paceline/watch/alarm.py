"""Alarm: what the watch found, in words for the log, the metrics and the page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TEXT, DISTRIBUTION = "text", "distribution"
DRAFTED, ACCEPTED, EMITTED = "drafted", "accepted", "emitted"
FELL, ROSE = "acceptance fell", "acceptance rose"
LAWS = (DRAFTED, ACCEPTED, EMITTED)
NOTES = (FELL, ROSE)
"""Kinds that are worth knowing and no proof of anything: they are told and change nothing."""

REPRODUCE = ("send the request again with \"trace\": true and this seed, and run `paceline replay` on its trace; "
             "`paceline verify MODEL` compares the steps themselves")


@dataclass(frozen=True, slots=True)
class Alarm:
    """One finding."""

    kind: str
    method: str
    rule: str
    tokens: int
    """Of the method's watched requests, judged until it was found."""
    evidence: str
    """What was seen, in a sentence without a word of anybody's text."""
    request: str | None = None
    """The last request that was judged."""
    seed: int | None = None
    at: float = 0.0
    """Seconds on the engine's clock."""
    suspended: bool = False
    """Whether the method was switched off for it."""

    @property
    def note(self) -> bool:
        return self.kind in NOTES

    def sentence(self) -> str:
        """For the log."""
        where = "" if self.request is None else f" (request {self.request}, seed {self.seed})"
        after = " It drafts no more until the engine is made anew." if self.suspended else ""
        how = "" if self.note else f" To reproduce: {REPRODUCE}."
        return (f"drift watch, method {self.method}, rule {self.rule}, {self.kind}: {self.evidence} after "
                f"{self.tokens} tokens{where}.{after}{how}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
