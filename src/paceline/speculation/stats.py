"""What speculation did for one sequence, and where each of its tokens came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.speculation.verify import RULES


class Provenance(NamedTuple):
    """Where a token came from: "plain", "accepted", "corrected" or "bonus", and of an accepted one the drafter."""

    outcome: str
    drafter: str | None = None

    def __str__(self) -> str:
        return self.outcome if self.drafter is None else f"{self.outcome} ({self.drafter})"


class Round(NamedTuple):
    """What a device drafted by itself at one time, and what came of it."""

    drafted: int
    accepted: int
    matched: int
    """Tokens before the draft that equalled those at the end of the text; 0: nothing was found, -1: nothing was looked
    up."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request, or the sum of several (add). A cycle is one verification pass with a draft."""

    method: str
    verify: str = "coupled"
    """The verification rule asked for."""
    rule: str = "coupled"
    """The one that carries it out (verify.rule_for), for reports: the rule itself is the sequence's."""
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    """Tokens the cycles yielded: accepted drafts plus one each, except where the text ended inside a draft."""
    by_depth: list[int] = field(default_factory=list)
    """by_depth[d]: cycles in which the draft was accepted at depth d + 1."""
    tried_by_depth: list[int] = field(default_factory=list)
    """tried_by_depth[d]: cycles whose draft reached depth d + 1."""
    reached_by_depth: list[int] = field(default_factory=list)
    """reached_by_depth[d]: those of them in which all before it was accepted."""
    provenance: list[Provenance] = field(default_factory=list)
    """Per output token of sample 0."""
    overlap: float = 0.0
    """The sum of min(p, q) over the vocabulary, added up over drafted tokens that were sampled from a known q and
    tested."""
    overlapped: int = 0
    """How many those are."""
    plain: int = 0
    """Tokens of steps without a draft, one each; the first token, which comes with the prompt, is not among them."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    """Seconds of its decode steps spent drafting, in the model and sampling: shares by rows where steps were shared.
    None of them in steps that a device drafts and repeats by itself, whose parts are not measured."""
    spent_s: float = 0.0
    """All of their time, the engine's bookkeeping included; of steps that a device repeats by itself, the device's."""
    compared_s: float = 0.0
    """That of the steps whose like without drafts was measured."""
    plain_s: float = 0.0
    """What plain decoding would have taken for the tokens of those, by the measured step cost."""
    failure: str | None = None
    """Why the drafter was switched off for this request, if it was."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Parts of a drafter made of others that failed and were left out, and why."""

    @property
    def lossy(self) -> bool:
        """The rule was asked to let drafts bend the text: it does not follow the target's law."""
        return RULES[self.rule].lossy

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per cycle, the bonus token counted (plain decoding is 1.0)."""
        return self.emitted / self.cycles if self.cycles else 1.0

    @property
    def expected_acceptance(self) -> float | None:
        """How likely a tested token was accepted, by what target and drafter thought of all tokens: the mean of the sum
        of min(p, q), free of luck. None: no rule read a q."""
        return self.overlap / self.overlapped if self.overlapped else None

    @property
    def tokens_per_step(self) -> float:
        """The same over all decode steps, those without a draft counted as one token each."""
        steps = self.cycles + self.plain
        return (self.emitted + self.plain) / steps if steps else 1.0

    @property
    def net_speed(self) -> float | None:
        """How many times as fast as plain decoding, by the engine's own estimate; None: nothing was measured."""
        return self.plain_s / self.compared_s if self.plain_s > 0.0 and self.compared_s > 0.0 else None

    @property
    def won_s(self) -> float | None:
        """Seconds saved against plain decoding, by the same estimate; below 0 where speculation lost."""
        return self.plain_s - self.compared_s if self.plain_s > 0.0 and self.compared_s > 0.0 else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the cycles whose draft reached depth 1, 2, ...: the share in which it was accepted there."""
        return [hits / tries for hits, tries in zip(self.by_depth, self.tried_by_depth)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """The same of the cycles in which everything before that depth was accepted."""
        return [hits / reached if reached else 0.0 for hits, reached in zip(self.by_depth, self.reached_by_depth)]

    def spend(self, draft: float, verify: float, sample: float, whole: float, plain: float | None) -> None:
        """Seconds of one decode step, and what plain decoding would have taken for its tokens; None: nobody knows."""
        self.draft_s += draft
        self.verify_s += verify
        self.sample_s += sample
        self.spent_s += whole
        if plain is not None:
            self.compared_s += whole
            self.plain_s += plain

    def record(self, depth: int, path: int, drafted: int, emitted: int) -> None:
        """One cycle: a draft so deep, accepted along a path of so many of its nodes."""
        self.cycles += 1
        self.drafted += drafted
        self.accepted += path
        self.emitted += emitted
        _add_up(self.by_depth, [1] * path + [0] * (depth - path))
        _add_up(self.tried_by_depth, [1] * depth)
        _add_up(self.reached_by_depth, [1] * min(depth, path + 1))

    def record_rounds(self, rounds: Sequence[Round], tokens: int) -> None:
        """What a device drafted by itself, time after time, and the tokens that came of it."""
        accepted = sum(one.accepted for one in rounds)
        drafts = [one for one in rounds if one.drafted]
        # The text may have ended inside the last draft: then it has no token of its own.
        cut = len(rounds) + accepted - tokens
        self.cycles += len(drafts)
        self.plain += len(rounds) - len(drafts)
        self.drafted += sum(one.drafted for one in drafts)
        self.accepted += accepted
        self.emitted += accepted + len(drafts) - cut
        tried = _reaching([one.drafted for one in drafts])
        _add_up(self.by_depth, _reaching([one.accepted for one in drafts], len(tried)))
        _add_up(self.tried_by_depth, tried)
        _add_up(self.reached_by_depth, _reaching([min(one.drafted, one.accepted + 1) for one in drafts]))

    def add(self, other: SpeculationStats) -> None:
        """Another request's counts and times on top of these; method, rules, provenance and failure stay."""
        self.cycles += other.cycles
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.overlap += other.overlap
        self.overlapped += other.overlapped
        self.plain += other.plain
        _add_up(self.by_depth, other.by_depth)
        _add_up(self.tried_by_depth, other.tried_by_depth)
        _add_up(self.reached_by_depth, other.reached_by_depth)
        self.draft_s += other.draft_s
        self.verify_s += other.verify_s
        self.sample_s += other.sample_s
        self.spent_s += other.spent_s
        self.compared_s += other.compared_s
        self.plain_s += other.plain_s

    def as_dict(self) -> dict[str, Any]:
        return {"method": self.method, "verify": self.verify, "rule": self.rule, "lossy": self.lossy,
                "cycles": self.cycles, "drafted": self.drafted, "accepted": self.accepted,
                "plain": self.plain, "overlap": self.overlap, "overlapped": self.overlapped,
                "expected_acceptance": self.expected_acceptance, "mean_accepted_length": self.mean_accepted_length,
                "tokens_per_step": self.tokens_per_step,
                "acceptance_by_position": self.acceptance_by_position,
                "conditional_acceptance": self.conditional_acceptance, "accepted_by_depth": list(self.by_depth),
                "spent_s": self.spent_s, "compared_s": self.compared_s, "plain_s": self.plain_s,
                "draft_s": self.draft_s, "verify_s": self.verify_s, "sample_s": self.sample_s,
                "net_speed": self.net_speed, "won_s": self.won_s, "failure": self.failure,
                "dropped": dict(self.dropped)}


def _reaching(lengths: Sequence[int], most: int = 0) -> list[int]:
    """How many are at least 1, 2, ... long; `most`: entries, at least."""
    found = [0] * max([most, *lengths])
    for length in lengths:
        if length:
            found[length - 1] += 1
    for index in range(len(found) - 1, 0, -1):
        found[index - 1] += found[index]
    return found


def _add_up(ours: list[int], theirs: Sequence[int]) -> None:
    """theirs[i] on ours[i], which grows as needed."""
    ours += [0] * (len(theirs) - len(ours))
    for index, count in enumerate(theirs):
        ours[index] += count
