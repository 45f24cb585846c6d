"""suffix: counts of all substrings, in the request and in a bounded library of all requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.kernels import cpu
from paceline.speculation.drafter import DraftContext
from paceline.speculation.drafters.suffix import SuffixDrafter
from paceline.speculation.spec import build, parse
from paceline.speculation.suffix_automaton import SuffixAutomaton
from paceline.speculation.suffix_library import SuffixLibrary, Volume
from paceline.speculation.suffix_tree import SuffixTree, Text, new_tree
from speculation.fake_text import FakeText, propose, say

Make = Callable[[int], SuffixTree]
TREES: list[Make] = [new_tree, SuffixAutomaton] if cpu.load() else [new_tree]
"""The tree that drafters get and, where that one is native, the one they get without the library."""
EACH_TREE = pytest.mark.parametrize("make", TREES)
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=3)


def grown(make: Make, texts: list[list[int]], depth: int) -> tuple[SuffixTree, list[Text]]:
    """A tree of the texts, which grew in turns."""
    tree = make(depth)
    ends = [tree.begin() for _ in texts]
    for at in range(max(map(len, texts))):
        for text, end in zip(texts, ends):
            tree.extend(end, text[at:at + 1])
    return tree, ends


def substrings(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text[begin:end]) for text in texts for begin in range(len(text))
                   for end in range(begin + 1, min(len(text), begin + depth) + 1))


def followers(texts: list[list[int]], string: list[int]) -> list[int]:
    """What followed each occurrence of a string, in the order in which the texts grew."""
    size = len(string)
    found = [(at, number, text[at]) for number, text in enumerate(texts) for at in range(size, len(text))
             if text[at - size:at] == string]
    return [token for _, _, token in sorted(found)]


@EACH_TREE
@given(TEXTS, st.integers(2, 6))
def test_counts_equal_those_of_a_scan(make: Make, texts: list[list[int]], depth: int) -> None:
    tree, _ = grown(make, texts, depth)
    counted = substrings(texts, depth)
    for string, count in counted.items():
        assert tree.occurrences(string) == count
    for string in substrings([[0, 1, 2, 0, 2, 1, 0]], depth):
        assert tree.occurrences(string) == counted[string]


@EACH_TREE
@given(TEXTS, st.integers(1, 6))
def test_the_match_is_the_longest_suffix_that_was_continued(make: Make, texts: list[list[int]], longest: int) -> None:
    tree, ends = grown(make, texts, 6)
    for text, end in zip(texts, ends):
        sizes = [size for size in range(1, min(longest, len(text)) + 1) if followers(texts, text[-size:])]
        want = max(sizes, default=0)
        assert tree.match(text, longest)[1] == want
        assert tree.match_end(end, longest) == tree.match(text, longest)


@EACH_TREE
@given(TEXTS)
def test_a_chain_follows_the_most_frequent_token(make: Make, texts: list[list[int]]) -> None:
    tree, _ = grown(make, texts, 12)
    for text in texts:
        state, matched = tree.match(text, 6)
        if not matched:
            continue
        found = tree.chain(state, matched, 6, 0.0)
        string = text[len(text) - matched:]
        for token, count, continued, context in zip(found.tokens, found.counts, found.continued, found.contexts):
            string = string[len(string) - context:]  # shorter where the text ended
            seen = Counter(followers(texts, string))
            assert count == seen[token] == max(seen.values())
            assert continued == sum(seen.values())
            string = [*string, token]


@EACH_TREE
@given(TEXTS, st.integers(1, 12), st.sampled_from([0.0, 0.1, 0.4]))
def test_branches_are_the_most_probable_paths(make: Make, texts: list[list[int]], size: int, least: float) -> None:
    tree, _ = grown(make, texts, 12)
    state, matched = tree.match(texts[0], 4)
    if not matched:
        return
    found = tree.branches(state, matched, size, 4, least)
    paths: list[float] = []
    for parent, count, continued in zip(found.parents, found.counts, found.continued):
        paths.append((1.0 if parent < 0 else paths[parent]) * count / continued)
    paths = [round(path, 12) for path in paths]  # products of the same shares in another order are equal
    assert paths == sorted(paths, reverse=True) and all(path >= least for path in paths)
    siblings = list(zip(found.parents, found.tokens))
    assert len(siblings) == len(set(siblings)), "no two siblings are alike"
    if len(paths) < size:  # nothing was cut: the children of the match are complete
        seen = Counter(followers(texts, texts[0][-matched:]))
        total = sum(seen.values())
        assert sorted(t for p, t in siblings if p < 0) == sorted(t for t, n in seen.items() if n / total >= least)


@EACH_TREE
def test_memory_is_linear(make: Make) -> None:
    tree = make(64)
    tree.extend(tree.begin(), [(i * i) % 17 for i in range(3000)])
    assert tree.states <= 2 * 3000


def test_the_longer_the_match_the_longer_the_draft() -> None:
    tokens = list(range(100, 120))
    drafter = SuffixDrafter()
    for matched in (1, 3, 8):
        text = FakeText([*tokens, 7, *tokens[:matched]])
        drafter.begin(text)
        assert propose(drafter, text, 12).tokens == tokens[matched:2 * matched]
    generous = SuffixDrafter(factor=2.0, offset=1.0)
    text = FakeText([*tokens, 7, *tokens[:3]])
    generous.begin(text)
    assert len(propose(generous, text, 12)) == 7
    assert len(propose(generous, text, 5)) == 5


def test_a_draft_ends_where_it_becomes_improbable() -> None:
    """After 5 always 6; after 5 6 one of eight."""
    tokens = [token for last in range(20, 28) for token in (5, 6, last)] + [5]
    drafter = SuffixDrafter(factor=8.0, min_prob=0.2)
    text = FakeText(tokens)
    drafter.begin(text)
    assert propose(drafter, text).tokens == [6]


def test_a_tree_offers_the_alternatives() -> None:
    drafter = SuffixDrafter(factor=8.0, tree=True)
    text = FakeText([9, 5, 1, 9, 5, 1, 9, 5, 2, 9, 5])
    drafter.begin(text)
    draft = propose(drafter, text, 2)
    assert [token for token, parent in zip(draft.tokens, draft.parents) if parent < 0] == [1, 2]
    assert draft.scores[draft.tokens.index(1)] > draft.scores[draft.tokens.index(2)]


def test_a_text_in_a_loop_is_drafted_to_the_full_depth() -> None:
    drafter = SuffixDrafter()
    text = FakeText([9, *[1, 2, 3] * 6])
    drafter.begin(text)
    assert propose(drafter, text, 12).tokens == [1, 2, 3] * 4


def test_what_others_wrote_is_drafted_if_it_promises_more() -> None:
    library = SuffixLibrary(1000)
    drafter = SuffixDrafter(library=library)
    first = FakeText([1, 2, 3])
    drafter.begin(first)
    say(drafter, first, [4, 5, 6, 7, 8])
    drafter.release(first)
    second = FakeText([30, 4, 31, 2, 3, 4])
    drafter.begin(second)
    assert propose(drafter, second).tokens == [5, 6, 7]


def test_salts_keep_requests_apart() -> None:
    library = SuffixLibrary(1000)
    drafter = SuffixDrafter(library=library)
    secret = FakeText([1, 2, 3, 4, 5], scope="a")
    drafter.begin(secret)
    for salt, expected in (("a", [4, 5]), ("b", None), ("", None)):
        reader = FakeText([2, 3], scope=salt)
        drafter.begin(reader)
        draft = propose(drafter, reader)
        assert (None if draft is None else draft.tokens) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=30)), max_size=40),
       st.integers(1, 80))
def test_the_library_is_bounded_and_forgets_the_oldest_first(deeds: list[tuple[int, list[int]]], most: int) -> None:
    library = SuffixLibrary(100)
    volumes = [Volume("ab"[number % 2]) for number in range(4)]
    for number, tokens in deeds:
        library.add(volumes[number], tokens)
        library.work(most)
        assert library.tokens <= 100
        assert library.tokens == sum(tree.tokens for salt in "ab" for tree in library.trees(salt))
        assert library._waiting == sum(map(len, library._pending)) <= 100
    last = Volume("a")
    library.add(last, [77, 78])
    library.work(1000)
    held = [sum(tree.occurrences([token]) for tree in library.trees("a")) for token in (77, 78)]
    assert held == [1, 1], "what came last is there, though perhaps in two trees"


def test_what_came_last_stays_where_it_filled_the_oldest_tree() -> None:
    library = SuffixLibrary(100)
    for salt, count in (("a", 24), ("b", 75)):
        library.add(Volume(salt), [0] * count)
        library.work(100)
    library.add(Volume("a"), [77, 78])
    library.work(100)
    assert [sum(tree.occurrences([token]) for tree in library.trees("a")) for token in (77, 78)] == [1, 1]


def test_a_full_library_keeps_three_quarters() -> None:
    library = SuffixLibrary(100)
    for number in range(50):
        library.add(Volume(""), [number] * 10)
        library.work(10)
    assert 75 <= library.tokens <= 100
    held = [any(tree.occurrences([number]) for tree in library.trees("")) for number in range(50)]
    assert held == sorted(held), "first in, first out"


def test_a_long_prompt_is_sorted_in_little_by_little() -> None:
    library = SuffixLibrary(10_000)
    drafter = SuffixDrafter(library=library)
    drafter.begin(FakeText(list(range(3000))))
    assert 0 < library.tokens <= 100
    other = FakeText([1])
    drafter.begin(other)
    for token in range(100):
        say(drafter, other, [token])
    assert library.tokens > 3000, "later calls, of whomever, finish it"


def test_requests_of_an_engine_share_one_library() -> None:
    context = DraftContext(100)
    first, second = (build(parse({"method": "suffix"}), context) for _ in range(2))
    assert first._library is second._library is not None
    alone = build(parse({"method": "suffix", "library_tokens": 0}), context)
    assert alone._library is None


@pytest.mark.parametrize("options", [{"factor": -1}, {"min_prob": 2}, {"tree": 1}, {"library_tokens": -5}, {"n": 1}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        build(parse({"method": "suffix", **options}), DraftContext(100))
