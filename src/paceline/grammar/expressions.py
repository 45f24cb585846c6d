"""Regular expressions as they are computed with: read from Rust's syntax, derived character by character.

Read are characters, classes, groups, alternatives, repetitions, and `^` and `$` at the ends of whole alternatives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

ANY: Final = r"[\s\S]"
LAST: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)
"""No characters: halves of some."""
QUOTED: Final = (ord('"'), ord("\\"))
MOST_NODES: Final = 1000
"""Parts of an expression, its repetitions written out."""
MOST_TIMES: Final = 80
"""What is repeated, at most."""
_NAMED: Final = {"d": ((48, 57),), "w": ((48, 57), (65, 90), (95, 95), (97, 122))}
"""Classes of few characters: as in JavaScript, to the library digits and letters are ASCII's."""
_REGIONS: Final = {"s": r"\s", "o": r"\S"}
"""Which characters beyond ASCII are spaces the library knows."""
_CONTROL: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}

Node = tuple[Any, ...]
"""("set", cells), ("join", nodes), ("either", frozenset of nodes) or ("star", node)."""
EMPTY: Final[Node] = ("join", ())
NONE: Final[Node] = ("either", frozenset())


class TooComplexError(Exception):
    """Nothing that can be computed with here."""


def is_surrogate(char: int) -> bool:
    return SURROGATES[0] <= char <= SURROGATES[1]


@dataclass(frozen=True)
class _Class:
    ranges: tuple[tuple[int, int], ...]
    names: tuple[str, ...] = ()
    """Regions of _REGIONS."""
    outside: bool = False

    def holds(self, region: str, char: int) -> bool:
        return (region in self.names or any(low <= char <= high for low, high in self.ranges)) is not self.outside


def _named(char: str) -> _Class:
    """What stands behind a backslash."""
    if char in "sS":
        return _Class((), ("s" if char == "s" else "o",))
    own = _NAMED[char.lower()]
    return _Class(own if char.islower() else _others(own))


class Alphabet:
    """All characters, cut into cells within which no class of an expression tells one from another. Sets of cells are
    bits of a number."""

    def __init__(self, classes: list[_Class]) -> None:
        ends = {0, 1, 128, LAST + 1} | {end for char in QUOTED for end in (char, char + 1)}
        named = any(one.names for one in classes)
        if named:
            ends.update(range(128))
        for one in classes:
            for low, high in one.ranges:
                ends |= {low, high + 1}
        self._places = [(region, low, high - 1) for low, high in pairwise(sorted(ends))
                        for region in (_region(low) if low < 128 else _REGIONS if named else "o")]
        self._named = named
        self._sets = {one: self._cells(one) for one in classes}
        self._short = {self._sets[one]: text for text in [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"]
                       if (one := _named(text[1])) in self._sets}
        kinds: dict[tuple[bool, ...], int] = {}
        for at in range(len(self._places)):
            told = tuple(bool(cells >> at & 1) for cells in self._sets.values())
            kinds[told] = kinds.get(told, 0) | 1 << at
        self.cells = [*kinds.values()]

    def _cells(self, one: _Class) -> int:
        return sum(1 << at for at, (region, low, _) in enumerate(self._places) if one.holds(region, low))

    def of(self, one: _Class) -> int:
        return self._sets[one]

    def written(self, cells: int) -> str:
        """A class of exactly these characters; of what would be too wide (repairs.quotable), without the NUL. Nothing
        where that leaves none."""
        if cells in self._short:
            return self._short[cells]
        by_region: dict[str, list[tuple[int, int]]] = {}
        least = int(not all(cells >> at & 1 for at, (_, low, _) in enumerate(self._places) if low in QUOTED))
        for at, (region, low, high) in enumerate(self._places):
            if cells >> at & 1:
                if high < least:
                    continue
                key = region if self._named and low >= 128 else ""
                own = by_region.setdefault(key, [])
                if own and own[-1][1] == low - 1:
                    own[-1] = own[-1][0], high
                else:
                    own.append((low, high))
        if by_region.get("s") == by_region.get("o"):
            by_region = {"": by_region.get("", []) + by_region.get("o", [])}
        parts = [_ranges(own) if not region else f"[{_REGIONS[region]}&&[{_ranges(own)}]]"
                 for region, own in by_region.items()]
        return f"[{''.join(parts)}]" if any(parts) else ""


def _region(char: int) -> str:
    return "s" if chr(char) in " \t\n\r\f\v" else "o"


def _others(own: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The ranges between sorted ones."""
    ends = [-1, *(end for one in own for end in one), LAST + 1]
    return tuple((low + 1, high - 1) for low, high in zip(ends[::2], ends[1::2]))


def _ranges(own: list[tuple[int, int]]) -> str:
    first, last = SURROGATES
    kept = [(last + 1 if is_surrogate(low) else low, first - 1 if is_surrogate(high) else high) for low, high in own]
    return "".join(rf"\x{{{low:x}}}" + (rf"-\x{{{high:x}}}" if high > low else "") for low, high in kept if low <= high)


def parsed(pattern: str) -> tuple[Node, Alphabet]:
    """Texts in which `pattern` is found, whole. Raises a TooComplexError."""
    root = _Reader(pattern).read()
    alphabet = Alphabet(_classes(root))
    return _placed(root, alphabet), alphabet


def class_of(text: str) -> _Class | None:
    """What `[...]` holds; None: that cannot be told here."""
    try:
        kind, found = _Reader(text).one()
    except TooComplexError:
        return None
    return found if kind == "set" else None


def _classes(root: Any) -> list[_Class]:
    """All that stand in it, each once."""
    found: dict[_Class, None] = {}
    waiting, seen = [root], 0
    while waiting:
        kind, inner = waiting.pop()
        if (seen := seen + 1) > MOST_NODES:
            raise TooComplexError
        if kind == "set":
            found[inner] = None
        else:
            waiting += [inner] if kind == "star" else inner
    return [*found]


def _placed(node: Any, alphabet: Alphabet) -> Node:
    kind, inner = node
    if kind == "set":
        return "set", alphabet.of(inner)
    if kind == "star":
        return star(_placed(inner, alphabet))
    return (join if kind == "join" else either)(*(_placed(one, alphabet) for one in inner))


def join(*nodes: Node) -> Node:
    flat = [inner for node in nodes for inner in (node[1] if node[0] == "join" else (node,))]
    return NONE if NONE in flat else flat[0] if len(flat) == 1 else ("join", tuple(flat))


def either(*nodes: Node) -> Node:
    flat = frozenset(inner for node in nodes for inner in (node[1] if node[0] == "either" else (node,)))
    return next(iter(flat)) if len(flat) == 1 else ("either", flat)


def star(node: Node) -> Node:
    return EMPTY if node in (EMPTY, NONE) else node if node[0] == "star" else ("star", node)


def empty(node: Node) -> bool:
    """Whether it matches the empty text."""
    kind, inner = node
    return kind == "star" or (kind != "set" and (all if kind == "join" else any)(map(empty, inner)))


def derived(node: Node, cell: int) -> Node:
    """What may follow behind a character of this cell (Brzozowski)."""
    kind, inner = node
    if kind == "set":
        return EMPTY if inner & cell else NONE
    if kind == "either":
        return either(*(derived(one, cell) for one in inner))
    if kind == "star":
        return join(derived(inner, cell), node)
    found = []
    for at, one in enumerate(inner):
        found.append(join(derived(one, cell), *inner[at + 1:]))
        if not empty(one):
            break
    return either(*found)


class _Reader:
    def __init__(self, pattern: str) -> None:
        if any(is_surrogate(ord(char)) for char in pattern):
            raise TooComplexError
        self._text, self._at = pattern, 0

    def read(self) -> Any:
        anything = "star", ("set", _Class(((0, LAST),)))
        found = []
        while True:
            free = not self._take("^")
            middle = self._sequence()
            end = self._take("$")
            found.append(("join", [*([anything] if free else []), middle, *([] if end else [anything])]))
            if not self._take("|"):
                break
        if self._at < len(self._text):
            raise TooComplexError
        return "either", found

    def one(self) -> Any:
        """What is a single part."""
        found = self._atom()
        if self._at < len(self._text):
            raise TooComplexError
        return found

    def _take(self, mark: str) -> bool:
        taken = self._text.startswith(mark, self._at)
        self._at += len(mark) if taken else 0
        return taken

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise TooComplexError
        self._at += 1
        return self._text[self._at - 1]

    def _sequence(self) -> Any:
        found = []
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            found.append(self._repeated(self._atom()))
        return "join", found

    def _atom(self) -> Any:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                named = re.compile(r"P?<\w+>").match(self._text, self._at)
                if named is None:
                    raise TooComplexError
                self._at = named.end()
            branches = [self._sequence()]
            while self._take("|"):
                branches.append(self._sequence())
            if not self._take(")"):
                raise TooComplexError
            return "either", branches
        if char == "[":
            return "set", self._class()
        if char == "\\":
            return "set", self._escaped()
        if char == ".":
            return "set", _Class(((10, 10),), outside=True)
        if char in "^*+?{":
            raise TooComplexError
        return "set", _Class(((ord(char), ord(char)),))

    def _repeated(self, node: Any) -> Any:
        counted = re.compile(r"\{(\d+)(,(\d*))?\}").match(self._text, self._at)
        if counted:
            self._at = counted.end()
            least = int(counted[1])
            most = least if counted[2] is None else int(counted[3]) if counted[3] else None
        elif self._at < len(self._text) and (mark := self._text[self._at]) in "*+?":
            self._at += 1
            least, most = int(mark == "+"), 1 if mark == "?" else None
        else:
            return node
        self._take("?")  # lazy: the same texts
        if max(least, most or 0) > MOST_TIMES or (most is not None and most < least):
            raise TooComplexError
        if most is None:
            return self._repeated(("join", [*[node] * least, ("star", node)]))
        maybe: Any = ("join", [])
        for _ in range(most - least):
            maybe = ("either", [("join", []), ("join", [node, maybe])])
        return self._repeated(("join", [*[node] * least, maybe]))

    def _escaped(self) -> _Class:
        char = self._next()
        if char in "dDwWsS":
            return _named(char)
        code = re.compile(r"\{([0-9a-fA-F]{1,6})\}|(?<=x)([0-9a-fA-F]{2})|(?<=u)([0-9a-fA-F]{4})").match(
            self._text, self._at) if char in "xu" else None
        if code is not None:
            self._at = code.end()
            value = int(code[1] or code[2] or code[3], 16)
            if value > LAST or is_surrogate(value):
                raise TooComplexError
            return _Class(((value, value),))
        if char.isalnum() and char not in _CONTROL:
            raise TooComplexError
        value = ord(_CONTROL.get(char, char))
        return _Class(((value, value),))

    def _class(self) -> _Class:
        outside = self._take("^")
        ranges: list[tuple[int, int]] = []
        names: list[str] = []
        while True:
            char = self._next()
            if char == "]" and (ranges or names):
                return _Class(tuple(ranges), tuple(names), outside)
            one = self._escaped() if char == "\\" else _Class(((ord(char), ord(char)),))
            if char == "[" or self._text[self._at - 1:self._at + 1] in ("&&", "--", "~~"):
                raise TooComplexError
            names += one.names
            low = one.ranges
            if low and self._text[self._at:self._at + 1] == "-" and self._text[self._at + 1:self._at + 2] != "]":
                self._at += 1
                char = self._next()
                high = self._escaped() if char == "\\" else _Class(((ord(char), ord(char)),))
                if not high.ranges or char == "[" or high.ranges[0][1] < low[0][0]:
                    raise TooComplexError
                low = ((low[0][0], high.ranges[0][1]),)
            ranges += low
