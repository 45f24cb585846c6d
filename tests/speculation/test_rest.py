"""rest: continuations from a sorted body of text on disk."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RequestError
from paceline.speculation.datastore import HEADER_SIZE, Datastore, Header, write_datastore
from paceline.speculation.drafter import DraftContext, Drafter
from paceline.speculation.drafters.rest import RestDrafter, best_path, frequent_prefixes
from paceline.speculation.spec import build, parse
from paceline.speculation.suffix_array import SORTED_BY, suffix_array
from speculation.fake_text import FakeText, propose

VOCAB = 50
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4).filter(
    lambda texts: sum(map(len, texts)) >= 2)


@given(st.lists(st.integers(0, 2), max_size=120))
def test_the_suffix_array_sorts_all_places(tokens: list[int]) -> None:
    want = sorted(range(len(tokens)), key=lambda at: (tokens[at:at + SORTED_BY], at))
    assert suffix_array(np.asarray(tokens, np.uint16)).tolist() == want


def test_pages_of_repetition_are_sorted_too() -> None:
    tokens = [1] * 200 + [0] + [1] * 200
    want = sorted(range(len(tokens)), key=lambda at: (tokens[at:at + SORTED_BY], at))
    assert suffix_array(np.asarray(tokens, np.uint32)).tolist() == want


def stored(folder: Path, texts: list[list[int]], vocab: int = VOCAB, fingerprint: str = "") -> Datastore:
    path = folder / "texts.store"
    write_datastore(path, texts, vocab, fingerprint)
    return Datastore(path)


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 12))
def test_hits_are_those_of_a_scan(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], end: list[int],
                                  size: int) -> None:
    store = stored(tmp_path_factory.mktemp("store"), texts)

    def scan(pattern: list[int]) -> list[list[int]]:
        length = len(pattern)
        return [(text[at + length:at + length + size] + [-1] * size)[:size] for text in texts
                for at in range(len(text) - length + 1) if text[at:at + length] == pattern]

    length, first, last = store.longest_suffix(end, 16, 2)
    lengths = [n for n in range(2, min(16, len(end)) + 1) if scan(end[-n:])]
    assert length == max(lengths, default=0)
    if length:
        rows = store.following(first, last, length, size, 5000)
        assert sorted(rows.tolist()) == sorted(scan(end[-length:]))


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=30), st.integers(1, 20))
def test_the_tree_holds_the_most_frequent_prefixes(continuations: list[list[int]], nodes: int) -> None:
    """The rows come as the datastore gives them: sorted, a text's end (-1) after every token."""
    rows = sorted([(row + [9] * 4)[:4] for row in continuations])
    matrix = np.asarray([[-1 if token == 9 else token for token in row] for row in rows])
    tree = frequent_prefixes(matrix, nodes)
    counts = Counter(tuple(row[:size]) for row in continuations for size in range(1, len(row) + 1))
    best = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix), prefix))[:nodes]
    if not best:
        assert tree is None and best_path(matrix) is None
        return
    assert [tuple(tree.path(node)) for node in range(len(tree))] == best
    for node, prefix in enumerate(best):
        above = counts[prefix[:-1]] if len(prefix) > 1 else len(rows)
        assert tree.scores[node] == counts[prefix] / above
    path = best_path(matrix)
    for depth, token in enumerate(path.tokens):
        level = {prefix[-1]: n for prefix, n in counts.items() if prefix[:-1] == tuple(path.tokens[:depth])
                 and len(prefix) == depth + 1}
        assert level[token] == max(level.values())
    assert path.is_chain


def test_many_hits_are_sampled_evenly(tmp_path: Path) -> None:
    store = stored(tmp_path, [[1, 2, token] for token in range(10) for _ in range(10)])
    _, first, last = store.longest_suffix([1, 2], 16, 2)
    assert last - first == 100
    rows = store.following(first, last, 2, 1, 20)
    assert Counter(rows[:, 0].tolist()) == dict.fromkeys(range(10), 2)


def test_a_draft_is_a_tree_or_its_best_path(tmp_path: Path) -> None:
    store = stored(tmp_path, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 6]])
    text = FakeText([9, 1, 2])
    tree = propose(RestDrafter("rest", store), text)
    assert {tuple(tree.path(node)) for node in range(len(tree))} == {(3,), (3, 4), (3, 5), (6,)}
    assert tree.drafter == "rest"
    assert propose(RestDrafter("rest", store), text, nodes=2).tokens == [3, 4]
    assert propose(RestDrafter("rest", store), text, depth=1).tokens == [3, 6]
    assert propose(RestDrafter("rest", store, chain=True), text).tokens == [3, 4]
    assert propose(RestDrafter("rest", store, chain=True), text, nodes=1).tokens == [3]
    assert propose(RestDrafter("rest", store), FakeText([2, 1])) is None
    assert propose(RestDrafter("rest", store), FakeText([1])) is None


def test_nothing_is_drafted_across_the_end_of_a_text(tmp_path: Path) -> None:
    store = stored(tmp_path, [[1, 2], [3, 4, 5]])
    assert propose(RestDrafter("rest", store), FakeText([1, 2])) is None
    assert propose(RestDrafter("rest", store), FakeText([3, 4])).tokens == [5]


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    store = stored(tmp_path, [[70000, 80000, 90000]], vocab=100_000)
    assert store.tokens.dtype.itemsize == 4
    assert propose(RestDrafter("rest", store), FakeText([70000, 80000])).tokens == [90000]
    narrow = stored(tmp_path, [[7, 8, 9]], vocab=65535)
    assert narrow.tokens.dtype.itemsize == 2 and int(narrow.tokens.max()) == 65535


def drafter(path: Path, context: DraftContext | None = None, **options: object) -> Drafter:
    wish = parse({"method": "rest", "datastore": str(path), **options})
    return build(wish, context or DraftContext(VOCAB))


def test_an_engine_opens_a_datastore_once(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3]]).path
    context = DraftContext(VOCAB)
    assert drafter(path, context)._store is drafter(path, context)._store


@pytest.mark.parametrize(("damage", "says"), [
    (lambda raw: raw[:-4], "bytes"), (lambda raw: raw + b"\0", "bytes"), (lambda raw: raw[:100], "cut off"),
    (lambda raw: raw[:HEADER_SIZE + 1] + b"\xff" + raw[HEADER_SIZE + 2:], "checksum"),
    (lambda raw: raw[:20] + b"\xff" + raw[21:], "checksum"), (lambda raw: raw[:8] + b"\x09" + raw[9:], "version 9"),
    (lambda raw: b"GGUF" + raw[4:], "not a datastore"), (lambda raw: b"", "not a datastore"),
])
def test_a_damaged_file_is_refused_with_a_reason(tmp_path: Path, damage: Callable[[bytes], bytes], says: str) -> None:
    path = stored(tmp_path, [[1, 2, 3, 4, 5, 6, 7]]).path
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RequestError, match=says) as refusal:
        drafter(path)
    assert "paceline train datastore" in str(refusal.value)


def test_a_file_that_lies_about_its_numbers_is_refused(tmp_path: Path) -> None:
    """A right checksum over wrong numbers: tokens outside the vocabulary must not reach a step."""
    path = stored(tmp_path, [[1, 2, 3]]).path
    raw = path.read_bytes()
    body = (VOCAB + 5).to_bytes(2, "little") + raw[HEADER_SIZE + 2:]
    header = replace(Header.unpack(raw, path), checksum=zlib.crc32(body))
    path.write_bytes(header.pack() + body)
    with pytest.raises(RequestError, match="out of range"):
        drafter(path)


def test_a_datastore_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, [[1, 2, 3]], fingerprint="abc").path
    drafter(path, DraftContext(VOCAB, fingerprint=lambda: "abc"))
    drafter(path, DraftContext(VOCAB + 10, fingerprint=lambda: "abc"))  # a model may have more rows than tokens
    with pytest.raises(RequestError, match="tokenizer"):
        drafter(path, DraftContext(VOCAB, fingerprint=lambda: "abd"))
    with pytest.raises(RequestError, match="vocabulary of 50"):
        drafter(path, DraftContext(VOCAB - 1))


@pytest.mark.parametrize("options", [{"longest": 40}, {"shortest": 9, "longest": 4}, {"hits": 0}, {"chain": "yes"}])
def test_bad_options(tmp_path: Path, options: dict[str, object]) -> None:
    path = stored(tmp_path, [[1, 2, 3]]).path
    with pytest.raises(RequestError):
        drafter(path, **options)


def test_missing_files_and_options() -> None:
    with pytest.raises(RequestError, match="needs 'datastore'"):
        build(parse("rest"), DraftContext(VOCAB))
    with pytest.raises(RequestError, match="cannot be read"):
        drafter(Path("no/such/file"))


def test_a_failed_write_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token ids"):
        write_datastore(tmp_path / "x", [[1, VOCAB]], VOCAB)
    with pytest.raises(RequestError, match="too little text"):
        write_datastore(tmp_path / "x", [[]], VOCAB)
    assert list(tmp_path.iterdir()) == []
