"""The native suffix tree answers what the one in Python does: states, counts, ties, orders and every bit of a score."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels import cpu
from paceline.speculation.drafters.suffix import SuffixDrafter
from paceline.speculation.suffix_automaton import SuffixAutomaton
from paceline.speculation.suffix_library import SuffixLibrary
from paceline.speculation.suffix_tree import Reach, new_tree
from speculation.fake_text import FakeText, propose, say

native = cpu.load()
pytestmark = pytest.mark.skipif(not hasattr(native, "SuffixTree"), reason="the native library is not built")

DEPTH = 12
TOKENS = st.lists(st.integers(0, 3), max_size=25)
DEEDS = st.lists(st.tuples(st.integers(0, 2), TOKENS), max_size=12)
"""What grows by which tokens, in turns."""
REACHES = st.builds(Reach, st.integers(1, DEPTH), st.sampled_from([0.0, 0.7, 1.0, 3.0]), st.floats(-5.0, 9.0),
                    st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 1.0]), st.booleans())


class Both:
    """A tree of each kind with the same texts."""

    def __init__(self, depth: int = DEPTH, texts: int = 3) -> None:
        self.python, self.native = SuffixAutomaton(depth), native.SuffixTree(depth)
        self.texts = [[] for _ in range(texts)]
        self.ends = [(self.python.begin(), self.native.begin()) for _ in range(texts)]

    def extend(self, number: int, tokens: list[int]) -> None:
        self.python.extend(self.ends[number][0], tokens)
        self.native.extend(self.ends[number][1], tokens)
        self.texts[number] += tokens
        assert self.python.states == self.native.states
        assert self.python.tokens == self.native.tokens
        assert self.ends[number][0].length == self.ends[number][1].length == len(self.texts[number])

    def match(self, tokens: list[int], longest: int) -> tuple[int, int]:
        found = self.python.match(tokens, longest)
        assert self.native.match(tokens, longest) == found
        return found

    def same(self, method: str, *arguments: object) -> None:
        assert fields(getattr(self.python, method)(*arguments)) == fields(getattr(self.native, method)(*arguments))

    def check(self, reach: Reach, nodes: int, depth: int, beyond: int) -> None:
        for text, (end, native_end) in zip(self.texts, self.ends):
            for string in (text, text[:-1], [*text[-3:], 99], text[len(text) // 2:]):
                self.same("draft", string, reach, nodes, depth, beyond)
                assert self.python.occurrences(string[-4:]) == self.native.occurrences(string[-4:])
                state, matched = self.match(string, reach.longest)
                if matched:
                    self.same("chain", state, matched, nodes, reach.min_prob)
                    self.same("branches", state, matched, nodes, depth, reach.min_prob)
            assert self.python.match_end(end, reach.longest) == self.native.match_end(native_end, reach.longest)
            assert fields(self.python.draft_end(end, reach, nodes, depth)) == \
                fields(self.native.draft_end(native_end, reach, nodes, depth))


def fields(found) -> tuple[object, ...]:
    return (found.matched, found.tokens, found.parents, found.counts, found.continued, found.contexts, found.scores,
            found.expected)


@settings(max_examples=300, deadline=None)
@given(DEEDS, REACHES, st.integers(1, 20), st.integers(1, 10), st.integers(0, 4))
def test_the_same_answers(deeds, reach, nodes, depth, beyond):
    both = Both()
    for number, tokens in deeds:
        both.extend(number, tokens)
    both.check(reach, nodes, depth, beyond)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 400), REACHES, st.integers(1, 200))
def test_the_same_answers_with_many_successors(seed, letters, reach, nodes):
    """Up to 128 successors are all looked at, more than that are not."""
    luck = random.Random(seed)
    both = Both()
    for _ in range(20):
        tokens = [luck.choice([0, 1, luck.randrange(letters)]) for _ in range(luck.randrange(90))]
        both.extend(luck.randrange(3), tokens)
    both.check(reach, nodes, 6, 0)


@pytest.mark.parametrize("successors", [1, 2, 127, 128, 129, 130, 500])
def test_the_widest_state_that_is_looked_at_whole(successors):
    both = Both()
    both.extend(0, [token for last in range(successors) for token in (7, 10 + last)] + [7])
    state, matched = both.match([7], 1)
    both.same("branches", state, matched, 1000, 1, 0.0)
    assert len(both.native.branches(state, matched, 1000, 1, 0.0).tokens) == (successors if successors <= 128 else 1)


@pytest.mark.parametrize("period", [1, 2, 3, 1000])
def test_hostile_texts_take_linear_time_and_memory(period):
    """Minutes, were it quadratic."""
    tree, count = native.SuffixTree(64), 200_000
    text = tree.begin()
    tree.extend(text, [i % period for i in range(count)])
    assert tree.states <= 2 * count and tree.tokens == text.length == count
    found = tree.draft_end(text, Reach(32, 1.0, 0.0, 0.1, False), 8, 8)
    assert found.tokens == [(count + i) % period for i in range(8)]


# ---------------------------------------------------------------- which one is used


def conversation() -> list[tuple[object, ...]]:
    """The drafts of requests that read and write alike, one after the other and beside each other."""
    luck, library, drafts = random.Random(5), SuffixLibrary(600), []
    drafters = [SuffixDrafter(library=library), SuffixDrafter(library=library, tree=True, factor=3.0), SuffixDrafter()]
    phrases = [[luck.randrange(30) for _ in range(luck.randrange(3, 15))] for _ in range(12)]
    for _ in range(15):
        drafter = luck.choice(drafters)
        prompts = [[token for phrase in luck.choices(phrases, k=6) for token in phrase] for _ in range(2)]
        texts = [FakeText(prompt, scope=luck.choice(["", "a"])) for prompt in prompts]
        for text in texts:
            drafter.begin(text)
        for _ in range(10):
            for text in texts:
                draft = propose(drafter, text)
                drafts.append((None,) if draft is None else (draft.tokens, draft.parents, draft.scores))
                say(drafter, text, luck.choice(phrases)[:luck.randrange(1, 5)])
        for text in texts:
            drafter.release(text)
    assert sum(len(draft) > 1 for draft in drafts) > 100
    return drafts


@pytest.mark.parametrize("library", [None, SimpleNamespace()], ids=["not built", "of older sources"])
def test_drafts_are_the_same_without_the_library(monkeypatch, library):
    assert isinstance(new_tree(8), native.SuffixTree)
    with_it = conversation()
    monkeypatch.setattr(cpu, "load", lambda: library)
    assert isinstance(new_tree(8), SuffixAutomaton)
    assert conversation() == with_it


# ---------------------------------------------------------------- the boundary


@pytest.mark.parametrize("depth", [0, -1, 1 << 21])
def test_no_tree_without_a_depth(depth):
    with pytest.raises(ValueError):
        native.SuffixTree(depth)


def test_a_text_is_of_one_tree():
    tree, other = native.SuffixTree(8), native.SuffixTree(8)
    text = tree.begin()
    tree.extend(text, [1, 2, 1])
    for call in (lambda: other.extend(text, [1]), lambda: other.match_end(text, 2),
                 lambda: other.draft_end(text, Reach(2, 1.0, 0.0, 0.0, False), 4, 4)):
        with pytest.raises(ValueError):
            call()
    del tree
    with pytest.raises(ValueError):
        native.SuffixTree(8).extend(text, [1])
    with pytest.raises(TypeError):
        native.SuffixText()


@pytest.mark.parametrize(("tokens", "error"), [([1, -1], ValueError), ([1, 1 << 31], TypeError), ([1, 2.5], TypeError),
                                               ([1, None], TypeError), (5, TypeError)])
def test_what_is_no_token_leaves_the_tree_as_it_was(tokens, error):
    tree = native.SuffixTree(8)
    text = tree.begin()
    with pytest.raises(error):
        tree.extend(text, tokens)
    assert (tree.tokens, tree.states, text.length) == (0, 1, 0)


@pytest.mark.parametrize(("method", "arguments"), [
    ("match", ([1], 0)), ("match", ([1], -5)), ("match", ([1], 1 << 21)),
    ("chain", (-1, 1, 4, 0.0)), ("chain", (99, 1, 4, 0.0)), ("chain", (1, 0, 4, 0.0)), ("chain", (1, 1, -4, 0.0)),
    ("chain", (1, 1, 1 << 40, 0.0)),
    ("branches", (-1, 1, 4, 4, 0.0)), ("branches", (99, 1, 4, 4, 0.0)), ("branches", (1, -1, 4, 4, 0.0)),
    ("branches", (1, 1, 1 << 40, 4, 0.0)), ("branches", (1, 1, 4, -1, 0.0)),
    ("draft", ([1], (0, 1.0, 0.0, 0.0, False), 4, 4, 0)), ("draft", ([1], (4, float("inf"), 0.0, 0.0, False), 4, 4, 0)),
    ("draft", ([1], (4, 1.0, float("nan"), 0.0, False), 4, 4, 0)),
    ("draft", ([1], (4, 1.0, 0.0, 0.0, False), -1, 4, 0)),
    ("draft", ([1], (4, 1.0, 0.0, 0.0, False), 4, 1 << 40, 0))])
def test_impossible_arguments_are_errors(method, arguments):
    tree = native.SuffixTree(8)
    tree.extend(tree.begin(), [1, 2, 1])
    with pytest.raises(ValueError):
        getattr(tree, method)(*arguments)


def test_an_end_is_known_to_the_depth():
    tree = native.SuffixTree(8)
    text = tree.begin()
    tree.extend(text, [1, 2, 1])
    assert tree.match_end(text, 8)[1] == 1
    with pytest.raises(ValueError):
        tree.match_end(text, 9)


@pytest.mark.parametrize("reach", [(4, 1.0, 0.0, 0.0), (4, 1.0, 0.0, 0.0, False, 1), None, ("a", 1.0, 0.0, 0.0, False)])
def test_a_reach_has_five_numbers(reach):
    tree = native.SuffixTree(8)
    with pytest.raises(TypeError):
        tree.draft([1], reach, 4, 4, 0)


def test_any_state_and_length_can_be_continued():
    """Nonsense at most: whatever is said of a state, nothing outside the tree is read."""
    luck, tree = random.Random(1), native.SuffixTree(8)
    text = tree.begin()
    tree.extend(text, [luck.randrange(4) for _ in range(300)])
    for state in range(tree.states):
        for matched in (1, 7, 1 << 20):
            assert len(tree.chain(state, matched, 50, 0.0).tokens) <= 50
            assert len(tree.branches(state, matched, 50, 9, 0.0).tokens) <= 50
