"""Proof: whether control makes steps faster by the clock than plain decoding would be, whatever it expects of them."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN_EVERY = 64
"""Steps with drafts of which one goes without, in each company: what all drafts are weighed against would else never be
measured again where there is always something to draft."""
DOUBTFUL, PLAIN_OFTEN = 0.85, 16
"""The share of plain decoding's time from which on it is that often: there a plain step costs little, and tells."""
MEMORY, PLAIN_MEMORY = 128.0, 16.0
"""Steps with and without drafts that are remembered."""
LEAST_PLAIN, PLAIN_AT_ONCE = 2, 4
"""Plain steps that have to be known before drafts are left alone, and how often there is one until then if they seem to
lose."""
LEAST = 32
"""Steps with drafts that a company must have had: the first of an engine find nothing in the machine's caches."""
LOST = 6.0
"""Plain steps' worth of time that drafts may lose, beyond what they won since, until they are left alone."""
FORGIVEN = 0.015
"""Plain steps' worth of time that a step may lose: tries of what should not pay are allowed as much."""
PAUSE, LONGEST = 256, 1024
"""Steps without drafts then; twice as many each time, up to that: other texts and methods suffer from it too."""
PROVEN = 128
"""Steps in a row with drafts after which the next pause is a short one again."""
ODD = 3.0
"""Times as long as expected that a step counts for at most."""


@dataclass
class _Company:
    drafting: float = 1.0
    plain: float = 1.0
    """What steps took, as a share of what plain decoding is expected to take for their tokens: the machine's own speed
    cancels out, and so does what is wrong about the expectation."""
    drafted: int = 0
    undrafted: int = 0
    """Steps of either kind that told, the first since the last pause."""
    ever: int = 0
    """Steps with drafts that told."""
    lost: float = 0.0
    """By drafts, in plain steps."""
    since: int = 0
    """Steps with drafts since the last plain one."""
    paused: int = 0
    """Steps for which nothing is drafted yet."""
    pause: int = PAUSE


class Proof:
    """What costs and acceptance promise is weighed for every draft; what came of all of it, here. By company (how many
    sequences run, to the power of two): where steps with drafts, and what it takes to make and to weigh them, lose
    against plain steps between them, nothing is drafted for a while, then tried again."""

    def __init__(self) -> None:
        self._companies: dict[int, _Company] = {}

    def _of(self, running: int) -> _Company:
        return self._companies.setdefault(running.bit_length(), _Company())

    def goes_without(self, running: int) -> bool:
        """Whether the next step is one without drafts. (Who always drafts does so then, too.)"""
        company = self._of(running)
        if company.paused > 0:
            return True
        wait = PLAIN_EVERY
        if company.lost > LOST:
            wait = PLAIN_AT_ONCE
        elif company.drafted and company.drafting > DOUBTFUL * company.plain:
            wait = PLAIN_OFTEN
        if company.since < wait:
            return False
        company.since = 0
        return True

    def observe(self, running: int, drafts: bool, share: float | None) -> None:
        """A step is over. `drafts`: some were asked for; `share`: what it took, of what plain decoding is expected to
        take for its tokens; None: it does not tell."""
        company = self._of(running)
        company.paused -= company.paused > 0
        company.since = company.since + 1 if drafts else 0
        if share is None:
            return
        share = min(share, ODD)
        company.lost = max(0.0, company.lost - FORGIVEN)
        if not drafts:
            company.undrafted += 1
            company.plain += (share - company.plain) / min(PLAIN_MEMORY, company.undrafted)
            if company.undrafted == LEAST_PLAIN:
                company.lost = 0.0
            return
        if company.paused:
            return
        company.ever += 1
        company.drafted += 1
        company.drafting += (share - company.drafting) / min(MEMORY, company.drafted)
        company.lost = max(0.0, company.lost + share - company.plain)
        # Bursts of other work meet drafts, of which most steps have some: on average, too, they have to lose.
        lose = company.lost > LOST and company.drafting > company.plain
        if lose and company.ever >= LEAST and company.undrafted >= LEAST_PLAIN:
            company.paused, company.pause = company.pause, min(LONGEST, 2 * company.pause)
            company.lost, company.drafted = 0.0, 0
        elif company.drafted >= PROVEN and company.drafting < company.plain:
            company.pause = PAUSE
