"""Forecast: what a draft should win, and what asking for one should, in tokens, before anybody has paid for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.speculation.costs import CostCurve
from paceline.speculation.drafter import Budget
from paceline.speculation.history import History
from paceline.speculation.tree import DraftTree


def best_win(chances: Sequence[float], price: float) -> tuple[float, int]:
    """The best that any beginning of a draft promises, accepted tokens less their price, and how long it is."""
    total = best = 0.0
    nodes = 0
    for count, chance in enumerate(chances, 1):
        total += chance - price
        if total > best:
            best, nodes = total, count
    return best, nodes


def rates_by_depth(history: History, draft: DraftTree) -> list[float]:
    """For each node of a draft without scores how likely it is accepted once its parent is: what its depth met with,
    shared among its siblings, of which one at most is right."""
    depths = draft.depths()
    by_depth = history.by_depth.rates(max(depths))
    children = Counter(draft.parents)
    return [by_depth[depth - 1] / children[parent] for depth, parent in zip(depths, draft.parents)]


def exclusive(chances: Sequence[float]) -> list[float]:
    """Siblings of different drafters, the likeliest first: one can be right only where those before it are not."""
    left, out = 1.0, list[float]()
    for chance in chances:
        out.append(chance * left)
        left -= out[-1]
    return out


def added(history: History, price: float, win: float = 0.0, first: float | None = 0.0) -> float:
    """Tokens that a drafter which ends its drafts itself should add, its time not counted: in place of a draft that
    promises to `win` so much, or beside it, where that is wrong from its first token on, whose chance is `first`. None:
    they cannot be verified together."""
    accepted, nodes = history.yields(win, price).expected()
    rows = nodes * price
    beside = 0.0 if first is None else (1.0 - first) * accepted - rows
    return max(accepted - rows - win, beside)


def win_by_depth(history: History, budget: Budget, width: float) -> tuple[int, float]:
    """Depth and win of a draft that says nothing of its chances, so many nodes at each depth; its time counts."""
    best, depth, alive, total = 0.0, 1, 1.0, 0.0
    cost = history.traits.cost
    for count, rate in enumerate(history.by_depth.rates(budget.depth), 1):
        alive *= rate
        total += alive - width * budget.price
        win = total - budget.pace * (cost(count) if cost.measured else 0.0)
        if win > best:
            best, depth = win, count
    return depth, best


def worthwhile(gains: Sequence[float], paces: Sequence[float], rounds: CostCurve) -> int:
    """Of how many of these gains, the largest first, the sum is largest once the time that a round for so many takes is
    paid for."""
    pace = sum(paces) / len(paces) if paces and rounds.measured else 0.0
    total = best = 0.0
    count = 0
    for asked, gain in enumerate(gains, 1):
        total += gain
        win = total - pace * rounds(asked)
        if win > best:
            best, count = win, asked
    return count
