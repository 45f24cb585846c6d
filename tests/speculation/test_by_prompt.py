"""What is made of a prompt is made once for all who begin with it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.kernels import cpu
from paceline.speculation.by_prompt import ByPrompt
from paceline.speculation.drafter import Budget, Observation
from paceline.speculation.drafters import suffix
from paceline.speculation.drafters.ngram import NgramDrafter, NgramIndex
from paceline.speculation.drafters.suffix import SuffixDrafter
from paceline.speculation.suffix_automaton import SuffixAutomaton
from paceline.speculation.suffix_library import SuffixLibrary
from paceline.speculation.suffix_tree import Reach, new_tree
from speculation.test_auto import Text

TOKENS = st.lists(st.integers(0, 3), max_size=40)
TREES = [new_tree, SuffixAutomaton] if cpu.load() else [new_tree]
REACH = Reach(6, 2.0, 1.0, 0.05, False)


def test_it_is_kept_while_anybody_has_joined_and_apart_by_scope() -> None:
    made: list[list[int]] = []

    def make(prompt: list[int]) -> int:
        made.append(prompt)
        return len(made)

    kept = ByPrompt(make)
    first, second, other, hers = Text([1, 2]), Text([1, 2]), Text([1, 2, 3]), Text([1, 2], "hers")
    assert [kept.join(one) for one in (first, second, other, hers)] == [(1, True), (1, False), (2, True), (3, True)]
    assert made == [[1, 2], [1, 2, 3], [1, 2]] and len(kept) == 3
    kept.leave(first)
    kept.leave(first)  # who has left is forgotten
    assert kept.join(Text([1, 2])) == (1, False)
    for one in (second, other, hers):
        kept.leave(one)
    assert len(kept) == 1


def test_only_the_prompt_counts() -> None:
    kept = ByPrompt(len)
    begun = Text([1, 2])
    begun.tokens = [1, 2, 7, 8]
    assert kept.join(begun) == (2, True) and kept.join(Text([1, 2])) == (2, False)


@given(TOKENS, TOKENS)
def test_an_index_that_was_begun_finds_what_one_of_the_whole_text_does(prompt: list[int], more: list[int]) -> None:
    whole, begun = NgramIndex(1, 3), NgramIndex(1, 3)
    whole.catch_up(prompt + more)
    begun.catch_up(prompt)
    own = NgramIndex(1, 3, begun)
    own.catch_up(prompt + more)
    assert own.find(prompt + more) == whole.find(prompt + more)


@pytest.mark.parametrize("make", TREES)
@given(TOKENS, TOKENS, TOKENS)
def test_a_text_that_goes_on_from_another_is_like_one_of_its_own(make: type, prompt: list[int], more: list[int],
                                                                 sibling: list[int]) -> None:
    tree, alone = make(8), make(8)
    end, text = tree.begin(), alone.begin()
    tree.extend(end, prompt)
    own = tree.begin(end)
    alone.extend(text, prompt)
    for token in more:
        tree.extend(own, [token])
        alone.extend(text, [token])
        found, expected = (one.draft_end(which, REACH, 8, 8) for one, which in ((tree, own), (alone, text)))
        assert (found.matched, found.tokens, found.scores) == (expected.matched, expected.tokens, expected.scores)
    other = tree.begin(end)  # where the prompt ended, not where its first follower is
    assert other.length == len(prompt)
    tree.extend(other, sibling)
    counted = Counter(tuple((prompt + sibling)[at:at + 2]) for at in range(max(0, len(prompt) - 1),
                                                                           len(prompt) + len(sibling) - 1))
    both = Counter(tuple((prompt + more)[at:at + 2]) for at in range(len(prompt) + len(more) - 1))
    for pair, count in (counted + both).items():
        assert tree.occurrences(list(pair)) == count


def test_texts_of_other_trees_are_refused() -> None:
    if not hasattr(cpu.load(), "SuffixTree"):
        pytest.skip("the native library is not built")
    with pytest.raises(ValueError, match="another tree"):
        new_tree(4).begin(new_tree(4).begin())


def test_many_samples_read_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Counted(SuffixAutomaton):
        def extend(self, text, tokens):  # type: ignore[no-untyped-def]
            read.append(len(tokens))
            super().extend(text, tokens)

    monkeypatch.setattr(suffix, "new_tree", Counted)
    library = SuffixLibrary(100_000)
    drafters = [SuffixDrafter(library=library), NgramDrafter()]
    prompt = [5, 6, 7] * 300
    samples = [Text(prompt) for _ in range(64)]
    for drafter in drafters:
        for sample in samples:
            drafter.begin(sample)
    assert sum(read) == 0, "in a crowd most are never drafted for"
    for drafter in drafters:
        drafter.propose(samples, [Budget(4, 8)] * len(samples))
    assert sum(read) == len(prompt)
    library.work(1_000_000)
    assert sum(tree.tokens for tree in library.trees("")) == len(prompt)
    for number, sample in enumerate(samples):
        sample.tokens.append(100 + number)
        for drafter in drafters:
            drafter.observe(sample, Observation([100 + number]))
            drafter.release(sample)
    assert all(len(drafter._prompts) == 0 for drafter in drafters)
