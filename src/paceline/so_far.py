"""What has become of a request elsewhere: how it goes on in another engine from where a lost one left it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleSoFar:
    """What one sample has said. Noise is keyed by position and everything else is read off the tokens, so there is
    nothing more to carry."""

    token_ids: tuple[int, ...] = ()
    characters: int = 0
    """Of its text, those that the client has been told: text may lag behind tokens."""
    finish_reason: str | None = None
    """Set where the client has been told that it has ended."""
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """Of a request that was somebody else's before."""

    so_far: tuple[SampleSoFar, ...] = ()
    """One a sample; empty: nothing has been said."""
    arrival: float | None = None
    """When the client asked, on the clock of the engine that goes on; None: now."""
    accepted: bool = False
    """It is not refused for a full queue: it has waited in another."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a client hears of a request that changed workers."""

    times: int
    exact: bool
    """The text is the one of a run that was not disturbed. Else drafts were verified by a rule whose randomness depends
    on where they began, or kernels promise no bits: nothing that was said has changed, and the law is kept."""
