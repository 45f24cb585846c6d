"""SuffixAutomaton: the suffix tree in Python, for machines without the native library and to compare that one with.

It is stored as a suffix automaton, which folds the tree's equal branches into one: about one and a half states a token
instead of one node per token and length, and a new token costs a few steps whatever the length of the text.
native/suffix_tree.cpp does the same in the same order, down to the numbers of states: what changes here changes there.

Counts are kept for strings of up to `depth` tokens. A state stands for all strings that occur at exactly the same
places; the link of a state leads to the next shorter suffixes, those that occur at more places.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.speculation.suffix_tree import Reach

_NONE = -1
_WIDE = 128
"""A state with more successors than this offers only the most frequent one to a branching draft: looking at all of
them would take longer than they are worth."""
_DOUBT = 2.5
"""Weight of what was never seen, against one sighting after a match of one token; a longer match leaves less doubt."""


class Text:
    """One text of a tree: where its end stands."""

    __slots__ = ("deepest", "last", "length")

    def __init__(self) -> None:
        self.last = 0
        """The state of the whole text."""
        self.deepest = 0
        """The state of its last `depth` tokens: from here on down the links, counts are kept."""
        self.length = 0


class Continuation:
    """What followed a string, as a tree: parents before children, -1 for what follows the string itself."""

    __slots__ = ("_paths", "contexts", "continued", "counts", "expected", "matched", "parents", "scores", "tokens")

    def __init__(self, matched: int) -> None:
        self.matched = matched
        """How many tokens the string has."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.counts: list[int] = []
        """How often each token followed its parent's path."""
        self.continued: list[int] = []
        """How often anything followed that path; counts / continued is the token's probability."""
        self.contexts: list[int] = []
        """How many tokens that path has, the string before it included."""
        self.scores: list[float] = []
        """That probability, less what is in doubt where little was counted after a short path."""
        self.expected = 0.0
        """The sum of the chances, by their scores, that the whole path to a node is right."""
        self._paths: list[float] = []

    def add(self, token: int, parent: int, count: int, continued: int, context: int) -> None:
        score = count / (continued + _DOUBT / context)
        path = score if parent < 0 else self._paths[parent] * score
        self.tokens.append(token)
        self.parents.append(parent)
        self.counts.append(count)
        self.continued.append(continued)
        self.contexts.append(context)
        self.scores.append(score)
        self._paths.append(path)
        self.expected += path


class SuffixAutomaton:
    """Grows by `extend` only. Several texts may grow in turns; no substring spans two of them."""

    __slots__ = ("_best", "_best_count", "_child", "_continued", "_count", "_depth", "_length", "_link", "_more",
                 "_token", "tokens")

    def __init__(self, depth: int = 64) -> None:
        self._depth = depth
        self.tokens = 0
        """How many tokens it holds, over all texts."""
        # One entry a state. Most states have one successor, kept inline; the further ones are in _more.
        self._length = array("i")
        """Of the longest string."""
        self._link = array("i")
        self._count = array("i")
        """Occurrences."""
        self._continued = array("i")
        """Occurrences that something followed."""
        self._token = array("i")
        self._child = array("i")
        self._best = array("i")
        """The token that followed most often; among equals, most recently."""
        self._best_count = array("i")
        self._more: dict[int, dict[int, int]] = {}
        self._new_state(0, _NONE)

    @property
    def states(self) -> int:
        return len(self._length)

    # ---------------------------------------------------------------- growing

    def begin(self, like: Text | None = None) -> Text:
        """A further text, empty yet, or one that goes on from where another one of this tree ends now: what both have
        in common is counted once."""
        text = Text()
        if like is not None:
            text.last, text.deepest, text.length = like.last, like.deepest, like.length
        return text

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to one of the texts."""
        for token in tokens:
            text.last = self._append(text.last, token)
            self._count_from(text, token)
        self.tokens += len(tokens)

    def _append(self, last: int, token: int) -> int:
        """The state of a text that ended at `last` and goes on with `token`."""
        length, link, inline, children = self._length, self._link, self._token, self._child
        there = self._next(last, token)
        if there != _NONE:  # another text went on like this before
            return there if length[there] == length[last] + 1 else self._split(last, token, there)
        new = self._new_state(length[last] + 1, 0)
        at = last
        while at != _NONE:
            if inline[at] == _NONE:  # the usual case, without a call
                inline[at] = token
                children[at] = new
            else:
                there = self._next(at, token)
                if there != _NONE:
                    link[new] = there if length[there] == length[at] + 1 else self._split(at, token, there)
                    break
                self._more.setdefault(at, {})[token] = new
            at = link[at]
        return new

    def _split(self, at: int, token: int, old: int) -> int:
        """Give the strings of `old` that are one longer than those of `at`, and all shorter ones, a state of their
        own: from now on they occur at more places than the rest."""
        new = self._new_state(self._length[at] + 1, self._link[old])
        for column in (self._count, self._continued, self._token, self._child, self._best, self._best_count):
            column[new] = column[old]
        if old in self._more:
            self._more[new] = dict(self._more[old])
        self._link[old] = new
        while at != _NONE and self._next(at, token) == old:
            if self._token[at] == token:
                self._child[at] = new
            else:
                self._more[at][token] = new
            at = self._link[at]
        return new

    def _count_from(self, text: Text, token: int) -> None:
        """Count the new occurrences: of every suffix of the old text (up to depth) that it was continued, of every
        suffix of the new text that it is there."""
        link, count = self._link, self._count
        continued, best, best_count = self._continued, self._best, self._best_count
        inline, children, more = self._token, self._child, self._more
        at = self._shortened(text.deepest, min(text.length, self._depth))
        counted = _NONE
        deepest = _NONE
        while at != _NONE:
            child = children[at] if inline[at] == token else more[at][token]
            if child != counted:  # neighbours on the way down often lead to the same state
                count[child] += 1
                counted = child
                if deepest == _NONE:
                    deepest = child
            continued[at] += 1
            if count[child] >= best_count[at]:
                best_count[at] = count[child]
                best[at] = token
            at = link[at]
        text.length += 1
        text.deepest = self._shortened(deepest, min(text.length, self._depth))

    def _shortened(self, state: int, size: int) -> int:
        """The state of the suffix of `size` tokens of a string in `state` that is at least as long."""
        length, link = self._length, self._link
        while state and length[link[state]] >= size:
            state = link[state]
        return state

    def _new_state(self, length: int, link: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._continued.append(0)
        self._token.append(_NONE)
        self._child.append(_NONE)
        self._best.append(_NONE)
        self._best_count.append(0)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._child[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    # ---------------------------------------------------------------- asking

    def draft(self, end: Sequence[int], reach: Reach, nodes: int, depth: int, beyond: int) -> Continuation:
        """What followed the longest suffix of `end` that occurs here and was continued. Empty where that suffix has no
        more than `beyond` tokens."""
        state, matched = self.match(end, reach.longest)
        return self._follow(state, matched, reach, nodes, depth) if matched > beyond else Continuation(matched)

    def draft_end(self, text: Text, reach: Reach, nodes: int, depth: int) -> Continuation:
        """draft() for the end of one of the texts."""
        return self._follow(*self.match_end(text, reach.longest), reach, nodes, depth)

    def _follow(self, state: int, matched: int, reach: Reach, nodes: int, depth: int) -> Continuation:
        size = min(int(reach.factor * matched + reach.offset), nodes) if matched else 0
        depth = min(depth, self._depth - matched)
        if reach.branching:
            return self.branches(state, matched, size, depth, reach.min_prob)
        return self.chain(state, matched, min(size, depth), reach.min_prob)

    def match(self, tokens: Sequence[int], longest: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of `tokens`, of at most `longest` tokens, that occurs here and was
        continued. Length 0: none."""
        length, link, inline, children, more = self._length, self._link, self._token, self._child, self._more
        nothing: dict[int, int] = {}
        state = size = 0
        for token in tokens[max(len(tokens) - longest, 0):]:
            while True:
                # _next(), written out: this loop is most of what a proposal costs
                child = children[state] if inline[state] == token else more.get(state, nothing).get(token, _NONE)
                if child != _NONE:
                    state = child
                    size += 1
                    break
                if not state:
                    break
                state = link[state]
                size = length[state]
        return self._continuable(state, size)

    def match_end(self, text: Text, longest: int) -> tuple[int, int]:
        """match() for the tokens of one of the texts: how its end occurred before. longest <= depth."""
        size = min(longest, text.length)
        return self._continuable(self._shortened(text.deepest, size), size)

    def _continuable(self, state: int, size: int) -> tuple[int, int]:
        while state and self._best[state] == _NONE:
            state = self._link[state]
            size = self._length[state]
        return state, size

    def occurrences(self, string: Sequence[int]) -> int:
        """How often a string of at most `depth` tokens occurs."""
        state = 0
        for token in string:
            state = self._next(state, token)
            if state == _NONE:
                return 0
        return self._count[state]

    def chain(self, state: int, matched: int, size: int, least: float) -> Continuation:
        """The most frequent continuation of the suffix of `matched` tokens in a state, token by token, up to `size`
        tokens and while the probability of the whole path is at least `least`."""
        found = Continuation(matched)
        path = 1.0
        while len(found.tokens) < size:
            state, matched = self._going_on(state, matched)
            continued = self._continued[state]
            path *= self._best_count[state] / continued if continued else 0.0
            if not continued or path < least:
                break
            token = self._best[state]
            found.add(token, len(found.tokens) - 1, self._best_count[state], continued, matched)
            state = self._next(state, token)
            matched += 1
        return found

    def branches(self, state: int, matched: int, size: int, depth: int, least: float) -> Continuation:
        """The `size` most probable continuations of the suffix of `matched` tokens in a state, of up to `depth`
        tokens, each with a path probability of at least `least`; the most probable first."""
        found = Continuation(matched)
        # -probability, then order: ties go to the one found first.
        queue: list[tuple[float, int, int, int, int, int, int, int]] = []
        order = 0

        def offer(parent: int, at: int, context: int, path: float, level: int) -> None:
            nonlocal order
            at, context = self._going_on(at, context)
            for token, count in self._successors(at):
                chance = path * count / self._continued[at]
                if chance >= least:
                    heapq.heappush(queue, (-chance, order, parent, token, at, context, count, level))
                    order += 1

        offer(_NONE, state, matched, 1.0, 1)
        while queue and len(found.tokens) < size:
            path, _, parent, token, at, context, count, level = heapq.heappop(queue)
            found.add(token, parent, count, self._continued[at], context)
            if level < depth:
                offer(len(found.tokens) - 1, self._next(at, token), context + 1, -path, level + 1)
        return found

    def _going_on(self, state: int, matched: int) -> tuple[int, int]:
        """A path that ran into the end of its text goes on from a shorter suffix, of at least half its length, that
        was continued elsewhere: a text that repeats itself meets its own end after each repetition."""
        while not self._continued[state] and self._length[self._link[state]] * 2 >= matched > 1:
            state = self._link[state]
            matched = self._length[state]
        return state, matched

    def _successors(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, how often it followed); the most frequent first, the others as they were first seen."""
        best = self._best[state]
        if best == _NONE:
            return
        yield best, self._best_count[state]
        more = self._more.get(state)
        if more is None or len(more) >= _WIDE:
            return
        if self._token[state] != best:
            yield self._token[state], self._count[self._child[state]]
        for token, child in more.items():
            if token != best:
                yield token, self._count[child]
