"""Files that somebody else wrote take no more memory than they have bytes, and every fault is a sentence."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_tokenizers import byte_level

from engine.tiny import BASE
from paceline.errors import ConfigError, ModelFormatError, RequestError
from paceline.measure import text_files
from paceline.measure.text_files import read_text
from paceline.models import rope
from paceline.models.config import ModelConfig
from paceline.models.fields import Fields, pattern, shown
from paceline.models.heads.formats.read import read_head
from paceline.models.load import reading as reading_files
from paceline.models.load.reading import read_json, reading
from paceline.models.rope import Rope
from paceline.models.tokenizer import Tokenizer, encoding
from paceline.training.shards import Shards, Text, read_manifest

TARGET = ModelConfig.from_dict(BASE | {"model_type": "llama"})


class PanicException(BaseException):
    """As libraries in Rust raise it: by this name, and no Exception."""


def test_a_panic_is_a_sentence_and_an_interrupt_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"m\.json is truncated or corrupt \(index out of bounds\): download"), \
            reading(tmp_path / "m.json"):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), reading(tmp_path):
        raise KeyboardInterrupt
    with pytest.raises(ConfigError, match="as it was"), reading(tmp_path):
        raise ConfigError("as it was")


def test_a_tokenizer_that_gives_up_on_a_text_fails_its_request_alone() -> None:
    with pytest.raises(RequestError, match="cannot encode this text"), encoding():
        raise PanicException("no")
    with pytest.raises(RequestError, match="lone surrogates"):
        Tokenizer(byte_level("gpt-2")).encode("\ud800")


@pytest.mark.parametrize(("content", "said"), [
    ("[" * 5000, "nest|recursion"), ("[" * 200 + "]" * 200, "100 levels deep"), ("9" * 5000, "digits"),
    ("{", "readable"), ('"\udcff"', "utf-8")])
def test_json_that_is_none(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "x.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFormatError, match=rf"x\.json.*({said})"):
        read_json(tmp_path / "x.json")


def test_what_is_no_file_or_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")  # to open it would wait for a writer
    with pytest.raises(ModelFormatError, match="no plain file"):
        read_json(tmp_path / "pipe.json")
    monkeypatch.setattr(reading_files, "MOST_TEXT_BYTES", 10)
    (tmp_path / "x.json").write_text("[1, 2, 3, 4, 5]")
    with pytest.raises(ModelFormatError, match="15 bytes"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("text", ["(a+)+$", "(.*)*x", "(?:a*b*)*", "a{5000}{5000}{99999999999}", "(" * 3000, "(",
                                  "((a{2,})*)"])
def test_patterns_that_may_never_end_are_refused(text: str) -> None:
    with pytest.raises(ModelFormatError, match="config"):
        pattern(text, "config")


@pytest.mark.parametrize("text", [r".*\.(q|v)_proj", r"model\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:q_proj|up_proj)",
                                  r"(.*?vision.*?)|(\bmodel\.layers\.\d+\.mlp)", r"layers\.(0|1)\d?"])
def test_patterns_of_adapters_are_read(text: str) -> None:
    assert pattern(text, "config").pattern == text


def test_messages_quote_a_part() -> None:
    assert len(shown(list(range(10_000)))) < 200 and "type int" in shown(10 ** 5000)
    with pytest.raises(ModelFormatError) as refused:
        Fields({"x": "y" * 10_000}, "config.json").count("x")
    assert "config.json: x must be a positive whole number" in str(refused.value) and len(str(refused.value)) < 300


# -- archives ----------------------------------------------------------------------------------------------------------

def test_a_packed_text_is_bounded_by_what_comes_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MOST_BYTES", 1000)
    for name, content in (("a.txt.gz", gzip.compress(b"x" * 1001)), ("b.txt", b"x" * 1001)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="more than"):
            read_text(tmp_path / name)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 1000))
    assert read_text(tmp_path / "a.txt.gz") == "x" * 1000


def head(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 0}))
    return folder / "medusa_lm_head.pt"


def test_a_pickled_head_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    path = head(tmp_path)
    torch.save({"0.0.weight": torch.zeros(97, 32)}, tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(ModelFormatError, match="would unpack to"):
        read_head(tmp_path, TARGET)


@pytest.mark.parametrize("tensor", [torch.zeros(1).expand(97, 1 << 40), torch.zeros(97, 32, device="meta"),
                                    torch.eye(4).to_sparse()])
def test_a_pickled_head_that_claims_more_than_it_stores_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({"0.0.weight": tensor}, head(tmp_path))
    with pytest.raises(ModelFormatError, match=r"larger than what is stored|more than tensors"):
        read_head(tmp_path, TARGET)


def shards(folder: Path) -> Path:
    Shards(folder, {"model": "m"}, 97).add([Text(0, np.arange(9, dtype=np.int32), 3)], [])
    return folder / "shard-00000.npz"


def said_to_have(folder: Path, **entry: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0] |= entry
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_manifest_names_files_of_its_own_folder(tmp_path: Path) -> None:
    inside = shards(tmp_path / "texts")
    (tmp_path / "outside.npz").write_bytes(inside.read_bytes())
    assert len(list(read_manifest(tmp_path / "texts", "again").read())) == 1
    said_to_have(tmp_path / "texts", file="../outside.npz")
    with pytest.raises(ConfigError, match=r"manifest\.json.*other folders"):
        read_manifest(tmp_path / "texts", "again")


@pytest.mark.parametrize("change", [{"lengths": [-9]}, {"prompts": [10]}, {"lengths": [8]}, {"lengths": [4, 5]},
                                    {"tokens": [[1] * 9]}, {"indexes": [0.5]}])
def test_a_shard_whose_lengths_are_wrong_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = shards(tmp_path)
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files} | {name: np.array(value) for name, value in change.items()}
    np.savez(path, **arrays)
    said_to_have(tmp_path, bytes=path.stat().st_size)
    with pytest.raises(ModelFormatError, match="lengths"):
        list(read_manifest(tmp_path, "again").read())


def test_a_packed_shard_is_refused(tmp_path: Path) -> None:
    path = shards(tmp_path)
    np.savez_compressed(path, tokens=np.zeros(1 << 20, np.uint16))
    said_to_have(tmp_path, bytes=path.stat().st_size)
    with pytest.raises(ModelFormatError, match="would unpack to"):
        list(read_manifest(tmp_path, "again").read())


def test_rotations_of_claimed_positions_are_not_computed_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "available_memory", lambda: 1 << 20)
    table = Rope(TARGET, 1 << 20, torch.device("cpu"))
    with pytest.raises(ConfigError, match="max_model_len"):
        table.halves()
    with pytest.raises(ConfigError, match="max_model_len"):
        Rope(TARGET, 1 << 50, torch.device("cpu"))
