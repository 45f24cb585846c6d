"""Stop strings: found across pieces, nothing of them shown, nothing held back for longer than needed."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.sampling.stop import StopMatcher

texts = st.text(alphabet="abé\n", max_size=40)
stops = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=5), max_size=4)


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The contract, read slowly: the match that ends first; of those, the one that starts first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end - len(longest)], longest
    return text, None


@given(texts, stops, st.lists(st.integers(0, 40), max_size=8))
def test_however_the_text_is_cut_the_outcome_is_that_of_the_whole(text, stops, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    shown, stopped = "", None
    for start, end in itertools.pairwise(edges):
        piece, found = matcher.push(text[start:end])
        shown += piece
        stopped = stopped or found
        assert whole(text, stops)[0].startswith(shown), "nothing is shown that would have to be taken back"
    assert (shown + matcher.flush(), stopped) == whole(text, stops)


@given(texts, stops)
def test_only_a_possible_beginning_of_a_stop_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    shown, stopped = matcher.push(text)
    held = matcher.flush()
    if stopped is None:
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_across_pieces():
    matcher = StopMatcher(["<end>"])
    assert matcher.push("text <e") == ("text ", None)
    assert matcher.push("nd") == ("", None)
    assert matcher.push("> more") == ("", "<end>")
    assert matcher.push("even more") == ("", "<end>")
    assert matcher.flush() == ""


def test_a_false_alarm_is_shown_in_full():
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", None)
    assert matcher.push("aa") == ("aa", None)
    assert matcher.push("c") == ("aac", None)


def test_a_complete_stop_does_not_wait_for_a_longer_one():
    assert StopMatcher(["\n\nUser:", "\n"]).push("done\n") == ("done", "\n")


def test_without_stops_text_passes_through():
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""
