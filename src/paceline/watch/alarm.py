"""What the watch found, in words for the log, the metrics and the page: alarms, and changes that are none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TEXT, DISTRIBUTION = "text", "distribution"
DRAFTED, ACCEPTED, EMITTED = "drafted", "accepted", "emitted"
LAWS = (DRAFTED, ACCEPTED, EMITTED)

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

    def sentence(self) -> str:
        """For the log."""
        where = "" if self.request is None else f" (request {self.request}, seed {self.seed})"
        after = " It drafts no more until the engine is made anew." if self.suspended else ""
        return (f"drift watch, method {self.method}, rule {self.rule}, {self.kind}: {self.evidence} after "
                f"{self.tokens} tokens{where}.{after} To reproduce: {REPRODUCE}.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AcceptanceChange:
    """Worth knowing and proof of nothing: other traffic alone changes what is accepted. It is told and changes
    nothing."""

    method: str
    rule: str
    rose: bool
    before: float
    after: float
    requests: int
    """Since when, about."""
    at: float
    """Seconds on the engine's clock."""

    @property
    def direction(self) -> str:
        return "rose" if self.rose else "fell"

    def sentence(self) -> str:
        """For the log."""
        return (f"drift watch, method {self.method}, rule {self.rule}: acceptance {self.direction}; it was "
                f"{self.before:.2f} and has been {self.after:.2f} in the last {self.requests} requests. That is no "
                "alarm: other traffic alone does it.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"direction": self.direction}
