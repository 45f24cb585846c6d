"""`paceline train datastore`: from text files to a file that the drafter rest opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizers import byte_level, gguf_metadata, write_tokenizer

from paceline.cli import train
from paceline.cli.main import main
from paceline.models.load.opening import open_checkpoint
from paceline.models.tokenizer import Tokenizer
from paceline.speculation.datastore import Datastore


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model.gguf", gguf_metadata(byte_level("gpt-2"), "gpt-2"))


def tokenizer_of(model: Path) -> Tokenizer:
    with open_checkpoint(model) as checkpoint:
        found = Tokenizer.from_checkpoint(checkpoint)
    assert found is not None
    return found


def test_texts_become_a_datastore(tmp_path, model, capsys):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps")
    (tmp_path / "b.txt").write_text("the quick brown dog sleeps")
    out = tmp_path / "out.store"
    assert main(["train", "datastore", str(out), str(tmp_path / "a.txt"), str(tmp_path / "b.txt"),
                 "--model", str(model), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tokenizer, store = tokenizer_of(model), Datastore(out)
    assert told["tokens"] == store.header.tokens and told["texts"] == 2 and told["bytes"] == out.stat().st_size
    store.fits(tokenizer.vocab_size, tokenizer.fingerprint())
    ids = [tokenizer.encode(f"the quick brown {rest}", add_special=False) for rest in ("fox jumps", "dog sleeps")]
    assert store.tokens.tolist() == [*ids[0], tokenizer.vocab_size, *ids[1], tokenizer.vocab_size]


def test_the_plain_answer_says_how_to_use_it(tmp_path, model, capsys):
    (tmp_path / "a.txt").write_text("some words of text")
    out = tmp_path / "out.store"
    assert main(["train", "datastore", str(out), str(tmp_path / "a.txt"), "-m", str(model)]) == 0
    wish = capsys.readouterr().out.split("--speculation '")[1].split("'")[0]
    assert json.loads(wish) == {"method": "rest", "datastore": str(out)}


def test_long_texts_are_cut_at_line_ends_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(train, "_PIECE", 10)
    text = "one\ntwo two two\n\nthree" * 5 + "\nand a last line without an end"
    pieces = list(train._pieces(text))
    assert "".join(pieces) == text and len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces[:-1])


@pytest.mark.parametrize(("arguments", "says"), [
    (["out.store", "missing.txt"], "Cannot read"), (["out.store", "latin.txt"], "not UTF-8"),
    (["nowhere/out.store", "a.txt"], "no folder"), (["a.txt", "a.txt"], "not a datastore"),
    (["out.store", "empty.txt"], "too little text"),
    (["out.store", "a.txt", "--model", "no-such-model"], "no-such-model"),
])
def test_mistakes_are_one_sentence_and_write_nothing(arguments, says, tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    before = sorted(tmp_path.iterdir())
    assert main(["train", "datastore", "--model", str(model), *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "a.txt").read_text() == "some words"
