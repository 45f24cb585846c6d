"""Shares of a step's rows: what each tenant's prompts may take, so that nobody's waits behind another's long one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.engine.schedule.sequence import Sequence


def prompt_shares(rows: int, prompts: Iterable[Sequence]) -> dict[tuple[int, str], int] | None:
    """Rows of a step for those who have prompts to compute, by priority and tenant. None: there is only one, or enough
    for all."""
    wanted: dict[tuple[int, str], int] = {}
    for seq in prompts:
        key = share_of(seq)
        wanted[key] = wanted.get(key, 0) + len(seq.tokens) - seq.computed
    if len({tenant for _, tenant in wanted}) < 2 or sum(wanted.values()) <= rows:
        return None
    shares: dict[tuple[int, str], int] = {}
    for level in sorted({level for level, _ in wanted}):
        own = divide(rows, {key: count for key, count in wanted.items() if key[0] == level})
        shares |= own
        rows -= sum(own.values())
    return shares


def share_of(seq: Sequence) -> tuple[int, str]:
    """Whose share its rows are taken from."""
    return seq.rank[0], seq.request.tenant.name


def divide(rows: int, wanted: Mapping[tuple[int, str], int]) -> dict[tuple[int, str], int]:
    """Equal shares; what somebody has no use for goes to the others, and odd rows to those who come first."""
    shares: dict[tuple[int, str], int] = {}
    for left, key in zip(range(len(wanted), 0, -1), sorted(wanted, key=lambda key: wanted[key])):
        shares[key] = min(wanted[key], -(-rows // left))
        rows -= shares[key]
    return shares
