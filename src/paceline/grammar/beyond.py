"""Expressions of all texts but some: but listed ones, or but those that match another expression.

Rust's syntax has no complement: the other one becomes an automaton, and what that refuses is written down again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.grammar.expressions import ANY, Alphabet, Node, TooComplexError, derived, empty, is_surrogate, parsed

MOST_STATES = 80
MOST_STEPS = 4000
"""Derivatives that are taken for one automaton: some tenths of a second."""
LONGEST = 20_000
"""Characters of an expression that is made here."""
DEEPEST = 100
"""Characters of a text that is left out: each of them is a group inside the one before."""


def texts_beyond(texts: Sequence[str]) -> str:
    """Matches every text but these. Raises a TooComplexError."""
    texts = [text for text in texts if not any(is_surrogate(ord(char)) for char in text)]  # others nobody can write
    if not texts:
        return f"^{ANY}*$"
    if max(map(len, texts)) > DEEPEST:
        raise TooComplexError
    tree: dict[str, Any] = {}
    for text in texts:
        place = tree
        for char in text:
            place = place.setdefault(char, {})
        place[""] = {}
    return f"^{_beyond(tree)}$"


def _beyond(tree: dict[str, Any]) -> str:
    """What may follow where these texts go on so: the end unless one of them ends, another character, or one of theirs
    and then what may follow there."""
    following = [char for char in tree if char]
    parts = [_char(char) + _beyond(tree[char]) for char in following]
    other = "[^" + "".join(map(_char, following)) + "]" if following else ANY
    return "(?:" + "|".join([other + ANY + "*", *parts]) + ")" + ("" if "" in tree else "?")


def _char(char: str) -> str:
    return rf"\x{{{ord(char):x}}}"


def other_texts(pattern: str) -> tuple[str | None, int]:
    """What matches every text in which `pattern` is not found (None: it is found in all), and the steps that this
    took. Raises a TooComplexError."""
    root, alphabet = parsed(pattern)
    states, edges = _automaton(root, alphabet)
    accepts = {place for place, state in enumerate(states) if not empty(state)}
    ways = {key: written for key, cells in edges.items() if (written := alphabet.written(cells))}
    text = _written(len(states), ways, accepts)
    if text is None and accepts:  # only texts with the NUL, which classes go without
        raise TooComplexError
    return None if text is None else f"^(?:{text})$", len(states) * len(alphabet.cells)


def _automaton(root: Node, alphabet: Alphabet) -> tuple[list[Node], dict[tuple[int, int], int]]:
    """States, the first of which is `root`, and between which of them which cells of the alphabet lead."""
    states, edges = {root: 0}, dict[tuple[int, int], int]()
    waiting, steps = [root], 0
    while waiting:
        state = waiting.pop()
        steps += len(alphabet.cells)
        if steps > MOST_STEPS:
            raise TooComplexError
        for cell in alphabet.cells:
            target = derived(state, cell)
            if target not in states:
                states[target] = len(states)
                waiting.append(target)
                if len(states) > MOST_STATES:
                    raise TooComplexError
            key = states[state], states[target]
            edges[key] = edges.get(key, 0) | cell
    return [*states], edges


def _written(count: int, edges: dict[tuple[int, int], str], accepts: set[int]) -> str | None:
    """One expression for all ways from state 0 to those that accept, by taking out state after state."""
    start, end = -1, -2
    edges = edges | {(start, 0): ""} | {(state, end): "" for state in accepts}
    left = {*range(count)}
    while left:
        state = _cheapest(left, edges)
        left.remove(state)
        loop = edges.get((state, state))
        round_ = f"(?:{loop})*" if loop else ""
        into = [(a, text) for (a, b), text in edges.items() if b == state != a]
        out = [(b, text) for (a, b), text in edges.items() if a == state != b]
        edges = {key: text for key, text in edges.items() if state not in key}
        for a, before in into:
            for b, behind in out:
                way = _group(before) + round_ + _group(behind)
                known = edges.get((a, b))
                edges[a, b] = way if known is None else f"{known}|{way}"
                if len(edges[a, b]) > LONGEST:
                    raise TooComplexError
    return edges.get((start, end))


def _cheapest(states: set[int], edges: Mapping[tuple[int, int], str]) -> int:
    """The one with the fewest ways through it."""
    into, out = Counter(b for a, b in edges if a != b), Counter(a for a, b in edges if a != b)
    return min(states, key=lambda one: (into[one] * out[one], -one))


def _group(text: str) -> str:
    return f"(?:{text})" if "|" in text else text

