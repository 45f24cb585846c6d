"""SampleState keeps only what its parameters use, and refuses ids the model does not have."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.request import SamplingParams
from paceline.sampling import SampleState, tokenise_bad_words
from paceline.sampling.state import BadWords, NgramFollowers, TokenCounts
from paceline.sampling.stop import StopMatcher

few = st.integers(0, 3)


def test_a_plain_request_tracks_nothing():
    state = SampleState(SamplingParams(temperature=0.0, top_p=0.5), [1, 2, 3], 9, 100, [0])
    assert state.is_greedy and not state.needs_processors and not state.truncates and not state.tracks
    state.append([4, 5])
    assert state.output_len == 2


def test_flags_say_what_a_row_needs():
    def flags(**params):
        state = SampleState(SamplingParams(max_tokens=None, **params), [1], 9, 100, [0])
        return state.is_greedy, state.truncates, state.needs_processors
    assert flags() == (False, False, False)
    assert flags(top_k=100) == (False, False, False)
    assert flags(top_k=99) == (False, True, False)
    assert flags(temperature=1e-12, top_p=0.5) == (True, False, False)
    assert flags(min_tokens=3) == (False, False, True)
    assert flags(min_tokens=3, ignore_eos=True) == (False, False, False)
    assert flags(logit_bias={3: 0.0}) == (False, False, False)
    for params in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}},
                   {"allowed_token_ids": (1,)}, {"no_repeat_ngram_size": 2}):
        assert flags(**params) == (False, False, True)


@pytest.mark.parametrize(("name", "value"), [("logit_bias", {100: 1.0}), ("allowed_token_ids", (1, 100)),
                                             ("stop_token_ids", (2**40,))])
def test_ids_beyond_the_vocabulary_are_refused(name, value):
    with pytest.raises(RequestError, match="end at 99") as caught:
        SampleState(SamplingParams(**{name: value}), [1], 0, 100)
    assert caught.value.param == name


def test_bad_words_are_tokenised_with_and_without_a_space():
    table = {"cat": [1], " cat": [2], " dog": [3, 4], "é": [5], " é": [5]}
    assert tokenise_bad_words(["cat", " dog", "é", "cat"], table.__getitem__) == [(1,), (2,), (3, 4), (5,)]


def test_bad_words_must_come_tokenised():
    with pytest.raises(RequestError) as caught:
        SampleState(SamplingParams(bad_words=("x",)), [1], 0, 100)
    assert caught.value.param == "bad_words"


@given(st.integers(1, 4), st.lists(few, max_size=12), st.lists(few, max_size=5))
def test_ngrams_ban_what_would_repeat(n, text, path):
    index = NgramFollowers(n, text)
    whole = text + path
    seen = {tuple(whole[i:i + n]) for i in range(len(whole) - n + 1)}
    end = tuple(whole[len(whole) - n + 1:])
    wanted = {token for token in range(4) if (*end, token) in seen} if len(whole) >= n - 1 else set()
    assert index.banned(path) == wanted
    assert NgramFollowers(n, whole).banned() == wanted


@given(st.lists(st.lists(few, min_size=1, max_size=4), max_size=5), st.lists(few, max_size=8),
       st.lists(few, max_size=4))
def test_bad_words_ban_their_last_token(words, text, path):
    keeper = BadWords(words, text[:3])
    for token in text[3:]:
        keeper.add(token)
    whole = text + path
    wanted = {word[-1] for word in words if len(word) - 1 <= len(whole)
              and whole[len(whole) - len(word) + 1:] == word[:-1]}
    assert set(keeper.banned(path)) == wanted


@given(st.lists(st.integers(0, 200), max_size=150), st.lists(st.integers(0, 200), max_size=150),
       st.lists(st.integers(0, 200), max_size=6))
def test_counts_grow_and_paths_leave_no_trace(first, later, path):
    counts = TokenCounts(first)
    for token in later:
        counts.add(token)
    wanted = {token: later.count(token) for token in {*first, *later}}
    with_path = {token: (later + path).count(token) for token in {*first, *later, *path}}
    for given_path, expected in ((path, with_path), ((), wanted)):
        ids, amounts = counts.plus(given_path)
        assert len(ids) == len(expected) and dict(zip(ids.tolist(), amounts.tolist())) == expected


def test_counts_outgrow_their_first_arrays():
    counts = TokenCounts()
    for token in [*range(300), *range(300)]:
        counts.add(token)
    ids, amounts = counts.plus(())
    assert ids.tolist() == list(range(300)) and amounts.tolist() == [2.0] * 300


@given(st.integers(1, 4), st.lists(few, max_size=12), st.lists(few, max_size=6), st.lists(few, max_size=6))
def test_samples_that_go_on_from_one_prompt_do_not_see_each_other(n, prompt, first, second):
    params = SamplingParams(no_repeat_ngram_size=n, repetition_penalty=1.5, bad_words=("x",))
    start = SampleState(params, prompt, 0, 100, [], [(1,), (2, 3), (3, 3, 1)])
    forks = start.fork(7), start.fork(8)
    for fork, text in zip(forks, (first, second)):
        fork.append(text)
    for fork, text, seed in zip(forks, (first, second), (7, 8)):
        alone = SampleState(params, prompt, seed, 100, [], [(1,), (2, 3), (3, 3, 1)])
        alone.append(text)
        assert set(fork.banned()) == set(alone.banned()) and set(fork.banned([3])) == set(alone.banned([3]))
        for mine, wanted in zip(fork.counts.plus(()), alone.counts.plus(())):
            assert mine.tolist() == wanted.tolist()
        assert (fork.seed, fork.output_len) == (seed, len(text))


def test_what_a_token_costs_does_not_depend_on_how_long_ngrams_are():
    """Runs of a text, each kept whole, were as many numbers as the square of its length."""
    def held(n):
        tracemalloc.start()
        index = NgramFollowers(n, range(2000))
        index.banned([1, 2, 3])
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    held(3)  # whatever is made but once
    assert held(1000) < 2 * held(3)
    assert held(100_000) < 2 * held(3)
    tokens = list(range(1500)) + list(range(1200))
    assert NgramFollowers(1000, tokens).banned() == {1200}
    assert NgramFollowers(1000, tokens).banned([1200, 1201]) == {1202}
    assert NgramFollowers(1000, tokens).banned([1200, 7]) == set()


def test_stop_strings_are_read_once_for_all_samples():
    one = StopMatcher(["<end>"])
    other = one.fork()
    assert one.push("a<en") == ("a", None) and other.push("d>") == ("d>", None)
    assert one.push("d>b") == ("", "<end>") and other.stopped is None
    assert other._root is one._root
