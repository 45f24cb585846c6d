"""ngram: the most recent continuation of the longest n-gram the text ends with."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.speculation.drafter import DraftContext
from paceline.speculation.drafters.ngram import NgramDrafter
from paceline.speculation.spec import build, parse
from speculation.fake_text import FakeText, propose, say


def looked_up(tokens: list[int], min_n: int, max_n: int, size: int) -> list[int]:
    """By scanning: the longest n first, the last place first."""
    for n in range(max_n, min_n - 1, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[at - n:at] == tokens[-n:]:
                copied = tokens[at:at + size]
                while n == max_n and len(copied) < size:
                    copied.append(copied[at - len(tokens)])
                return copied
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 2), st.integers(1, 9),
       st.data())
def test_equals_a_scan_however_the_text_grew(tokens: list[int], min_n: int, more: int, depth: int,
                                             data: st.DataObject) -> None:
    drafter = NgramDrafter(min_n=min_n, max_n=min_n + more)
    cut = data.draw(st.integers(1, len(tokens)))
    text = FakeText(tokens[:cut])
    drafter.begin(text)
    while len(text.tokens) < len(tokens):
        step = data.draw(st.integers(1, 5))
        say(drafter, text, tokens[len(text.tokens):len(text.tokens) + step])
    draft = propose(drafter, text, depth)
    assert ([] if draft is None else draft.tokens) == looked_up(tokens, min_n, min_n + more, depth)
    assert draft is None or draft.is_chain


def test_a_longer_match_wins_over_a_more_recent_one() -> None:
    drafter = NgramDrafter()
    text = FakeText([1, 2, 3, 50, 9, 3, 60, 1, 2, 3])
    drafter.begin(text)
    assert propose(drafter, text, 2).tokens == [50, 9]


def test_of_equally_long_matches_the_most_recent_wins() -> None:
    drafter = NgramDrafter()
    text = FakeText([3, 50, 4, 3, 60, 5, 3])
    drafter.begin(text)
    assert propose(drafter, text, 2).tokens == [60, 5]


def test_a_text_in_a_loop_is_drafted_to_the_full_depth() -> None:
    drafter = NgramDrafter()
    text = FakeText([9, 1, 2, 1, 2, 1, 2])
    drafter.begin(text)
    assert propose(drafter, text, 6).tokens == [1, 2, 1, 2, 1, 2]


def test_a_short_match_near_the_end_gives_a_short_draft() -> None:
    drafter = NgramDrafter()
    text = FakeText([7, 8, 5, 5])
    drafter.begin(text)
    assert propose(drafter, text, 6).tokens == [5]


def test_nothing_seen_before_nothing_said() -> None:
    drafter = NgramDrafter()
    text = FakeText([1, 2, 3])
    drafter.begin(text)
    assert propose(drafter, text) is None


def test_longer_matches_are_trusted_more() -> None:
    drafter = NgramDrafter()
    short, long = FakeText([1, 5, 6, 2, 1]), FakeText([4, 5, 6, 1, 7, 8, 4, 5, 6, 1])
    for text in (short, long):
        drafter.begin(text)
    assert propose(drafter, short, 2).scores[0] < propose(drafter, long, 2).scores[0] < 1
    scores = propose(drafter, long, 3).scores
    assert scores == sorted(scores), "each token that agreed makes the next one likelier"


def test_sequences_do_not_learn_from_each_other_and_are_forgotten() -> None:
    drafter = NgramDrafter()
    mine, other = FakeText([1, 2, 3, 1]), FakeText([1])
    drafter.begin(mine)
    drafter.begin(other)
    assert propose(drafter, other) is None
    drafter.release(mine)
    assert list(drafter._index) == [other]


@pytest.mark.parametrize("options", [{"max_n": 0}, {"max_n": 2.5}, {"min_n": 3, "max_n": 2}, {"window": 3}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        build(parse({"method": "ngram", **options}), DraftContext(100))


def test_a_drafter_that_nobody_has_any_more_does_not_wait_for_the_collector() -> None:
    """There is one for every request."""
    gone = weakref.ref(NgramDrafter())
    assert gone() is None
