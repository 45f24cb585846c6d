"""lookahead: guesses from a pool of n-grams, and a window of probes in which the target fills the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext, Observation
from paceline.speculation.drafters.lookahead import LookaheadDrafter, NgramPool
from paceline.speculation.spec import build, parse
from speculation.fake_text import FakeText, propose, say, verify


def by_last(tokens: list[int]) -> int:
    """A target that looks at its last token only."""
    return (tokens[-1] * 7 + 3) % 50


def by_two(tokens: list[int]) -> int:
    return (tokens[-1] * 5 + sum(tokens[-2:]) + 1) % 23


def window_of(drafter: LookaheadDrafter, text: FakeText) -> list[list[int]]:
    return [list(column) for column in drafter._states[text].window.columns]


def test_the_window_is_a_chain_with_a_column_below_each_of_its_tokens() -> None:
    drafter = LookaheadDrafter(window=3, ngram=4, guesses=1)
    text = FakeText(list(range(10, 40)))
    drafter.begin(text)
    drafter._states[text].window.columns = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    draft = propose(drafter, text)
    paths = {tuple(draft.path(node)) for node in range(len(draft))}
    assert paths == {(1,), (1, 2), (1, 2, 3), (1, 4), (1, 4, 5), (1, 4, 5, 6), (1, 4, 7), (1, 4, 7, 8), (1, 4, 7, 8, 9)}
    assert draft.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9], "column by column: what is cut off are whole columns"


def test_guesses_come_first_and_share_their_beginnings() -> None:
    drafter = LookaheadDrafter(window=1, ngram=4, guesses=3)
    text = FakeText([9, 1, 2, 3, 9, 1, 2, 4, 9])
    drafter.begin(text)
    draft = propose(drafter, text)
    assert draft.tokens[:4] == [1, 2, 4, 3] and draft.parents[:4] == [-1, 0, 1, 1]


def test_harvest_and_shift() -> None:
    """What the target says after the newest row completes an n-gram per column, and becomes the newest row."""
    drafter = LookaheadDrafter(window=3, ngram=4, guesses=5)
    text = FakeText([30, 31])
    drafter.begin(text)
    state = drafter._states[text]
    state.window.columns = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    draft = propose(drafter, text)
    chosen = [50, *(100 + token for token in draft.tokens)]
    text.tokens.append(50)
    drafter.observe(text, Observation([50], [], draft, chosen))
    assert window_of(drafter, text) == [[2, 3, 103], [5, 6, 106], [8, 9, 109]]
    assert [state.pool.after(first) for first in (1, 4, 7)] == [[(2, 3, 103)], [(5, 6, 106)], [(8, 9, 109)]]


def test_the_window_stays_ahead_of_a_text_that_leaps() -> None:
    """Three tokens at once: one is the shift, two columns are overtaken, two new ones come from the text."""
    drafter = LookaheadDrafter(window=3, ngram=4, guesses=5)
    text = FakeText([30, 31])
    drafter.begin(text)
    drafter._states[text].window.columns = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    draft = propose(drafter, text)
    chosen = [1, *(100 + token for token in draft.tokens)]
    text.tokens += [1, 4, 104]
    drafter.observe(text, Observation([1, 4, 104], [0, 3], draft, chosen))
    columns = window_of(drafter, text)
    assert columns[0] == [8, 9, 109]
    assert all(len(column) == 3 and set(column) <= {30, 31, 1, 4, 104} for column in columns[1:])


def test_the_window_grows_to_its_height() -> None:
    drafter = LookaheadDrafter(window=4, ngram=4, guesses=5)
    text = FakeText([1, 2])
    drafter.begin(text)
    heights = []
    for _ in range(5):
        heights.append(len(window_of(drafter, text)[0]))
        verify(drafter, text, propose(drafter, text), by_two)
    assert heights == [1, 2, 3, 3, 3]


@given(st.sampled_from([by_last, by_two]), st.integers(1, 5), st.integers(2, 5), st.integers(1, 4),
       st.lists(st.integers(0, 22), min_size=1, max_size=6), st.integers(1, 10), st.integers(1, 40))
def test_every_round_keeps_its_promises(model: Callable[[list[int]], int], width: int, n: int, guesses: int,
                                        prompt: list[int], depth: int, nodes: int) -> None:
    """Over many rounds and any budget: the text is the target's own; the window keeps its shape; after a full round
    each column is the old one moved up, with the target's own pick below it; the pool holds only what the target
    said after its column."""
    drafter = LookaheadDrafter(window=width, ngram=n, guesses=guesses)
    text = FakeText(prompt)
    drafter.begin(text)
    for _ in range(8):
        before, tokens = window_of(drafter, text), list(text.tokens)
        draft = propose(drafter, text, depth, nodes)
        asked = len(drafter._states[text].window.nodes)
        got = verify(drafter, text, draft, model)
        after = window_of(drafter, text)
        assert len(after) == width and len({len(column) for column in after}) == 1 and len(after[0]) <= n - 1
        full = len(before[0]) == n - 1
        lost = got - int(full) if asked else got
        for number in range(asked):
            path = tokens + [column[0] for column in before[:number]] + before[number]
            if number - lost >= 0:
                assert after[number - lost] == [*before[number][int(full):], model(path)]
    expected = list(prompt)
    while len(expected) < len(text.tokens):
        expected.append(model(expected))
    assert text.tokens == expected


def test_a_target_that_looks_back_little_is_soon_guessed() -> None:
    """Its n-grams are true wherever they were probed."""
    drafter = LookaheadDrafter()
    text = FakeText([1, 2])
    drafter.begin(text)
    steps = 0
    while len(text.tokens) < 120:
        verify(drafter, text, propose(drafter, text), by_last)
        steps += 1
    assert steps < 50


def test_rounds_without_a_draft_or_an_answer_do_no_harm() -> None:
    drafter = LookaheadDrafter(window=3, ngram=3)
    text = FakeText([1, 2, 3])
    drafter.begin(text)
    say(drafter, text, [4])
    draft = propose(drafter, text)
    text.tokens.append(5)
    drafter.observe(text, Observation([5], [], draft))  # a rule that does not tell what the target would have said
    assert propose(drafter, text) is not None
    drafter.release(text)
    assert not drafter._states


def test_of_a_draft_cut_short_only_the_columns_that_ran_are_harvested() -> None:
    drafter = LookaheadDrafter(window=3, ngram=3, guesses=2)
    text = FakeText([30, 31])
    drafter.begin(text)
    state = drafter._states[text]
    state.window.columns = [[1, 2], [4, 5], [7, 8]]
    draft = propose(drafter, text).trimmed(3)
    text.tokens.append(60)
    drafter.observe(text, Observation([60], [], draft, [60, 101, 102, 104]))
    assert state.pool.after(1) == [(2, 102)] and state.pool.after(4) == []
    assert len(window_of(drafter, text)) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=80), st.integers(1, 3), st.integers(1, 6))
def test_the_pool_keeps_the_most_recent(ngrams: list[tuple[int, int]], per_token: int, most: int) -> None:
    pool = NgramPool(per_token, most)
    for ngram in ngrams:
        pool.add(ngram)
        assert pool.after(ngram[0])[:1] in ([ngram[1:]], []) and len(pool) <= max(most, 0)
        assert len(pool) == sum(len(pool.after(first)) for first in range(4))
    for first in range(4):
        newest = list(dict.fromkeys((last,) for start, last in reversed(ngrams) if start == first))
        assert pool.after(first) == newest[:len(pool.after(first))]
        assert len(pool.after(first)) <= per_token


@pytest.mark.parametrize("options", [{"window": 0}, {"ngram": 1}, {"guesses": 0}, {"width": 3}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        build(parse({"method": "lookahead", **options}), DraftContext(100))
