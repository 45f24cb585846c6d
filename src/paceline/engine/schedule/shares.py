"""Shares of what a step has for prompts, so that nobody's waits behind another's long one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from paceline.engine.schedule.sequence import Sequence

Share = tuple[int, str]
"""Whose: priority (as in Sequence.rank) and tenant."""


def share_of(seq: Sequence) -> Share:
    """Whose share a prompt is computed from."""
    return seq.rank[0], seq.request.tenant.name


def allot(budget: float, prompts: Seq[Sequence], cost: Callable[[Sequence], float]) -> list[tuple[Sequence, float]]:
    """Who gets how much of a step's budget for prompts (rows or seconds, as `cost` of all that is left of a prompt), in
    the order of `prompts`. Higher priorities come first, and tenants of one have equal shares. Half of a share goes to
    who has least left, so that short prompts pass; the rest goes by order, so that nobody is passed for ever."""
    costs = {seq: cost(seq) for seq in prompts}
    wanted: dict[Share, float] = {}
    for seq, most in costs.items():
        wanted[share_of(seq)] = wanted.get(share_of(seq), 0.0) + most
    shares: dict[Share, float] = {}
    for level in sorted({level for level, _ in wanted}):
        own = divide(budget, {share: most for share, most in wanted.items() if share[0] == level})
        shares |= own
        budget -= sum(own.values())
    given: dict[Sequence, float] = {}
    for share, left in shares.items():
        waiting = [seq for seq in prompts if share_of(seq) == share]
        least = min(waiting, key=lambda seq: costs[seq])
        if least is not waiting[0]:
            given[least] = min(costs[least], left / 2)
            left -= given[least]
        for seq in waiting:
            if seq not in given:
                given[seq] = min(costs[seq], left)
                left -= given[seq]
    return [(seq, given[seq]) for seq in prompts]


def divide(budget: float, wanted: Mapping[Share, float]) -> dict[Share, float]:
    """Equal shares; what somebody has no use for goes to the others."""
    shares: dict[Share, float] = {}
    for left, share in zip(range(len(wanted), 0, -1), sorted(wanted, key=lambda share: wanted[share])):
        shares[share] = min(wanted[share], budget / left)
        budget -= shares[share]
    return shares
