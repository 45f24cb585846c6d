"""Heads that come with Paceline: found by what they were trained for, loaded unasked, never in the way."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.bench.gpu_shapes import config_of
from paceline.cli import options as cli_options
from paceline.config import EngineOptions
from paceline.engine.build import build_engine
from paceline.engine.trained_heads import comes_along
from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError
from paceline.hub.default_model import PACKAGED_MODELS
from paceline.models.heads.block import BlockHead
from paceline.models.heads.formats.read import read_head
from paceline.models.heads.packaged import MOST_BYTES, PACKAGED_HEADS, packaged_heads
from paceline.models.heads.tensors import MAPS
from paceline.speculation.spec import parse

FAMILY = Path(__file__).parents[1] / "family"
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    shutil.copytree(FAMILY / "dspark", tmp_path / "tiny" / "dspark")
    return tmp_path


def engine(packaged: Path, **more: Any) -> LLM:
    options = EngineOptions.of(**{"model": str(FAMILY / "target"), "device": "cpu", "deterministic": True,
                                  "kv_blocks": 40} | more)
    return LLM.from_engine(build_engine(options, packaged=packaged))


def edit(place: Path, **changes: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_engine_has_the_head_of_its_model_without_being_told(packaged: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "paceline.engine"):
        llm = engine(packaged)
    assert list(llm.engine.heads.heads) == ["tiny/dspark"]
    # Two layers, keys and values of two heads of 32 numbers each, in float32.
    assert any("tiny/dspark comes with Paceline and takes 1024 bytes" in line for line in caplog.messages)
    plain = llm.generate(["The king"], PARAMS, speculation=None)[0]
    for wish in ({"method": "dspark", "adaptive": False}, {"method": "dspark", "head": "tiny/dspark"}):
        out = llm.generate(["The king"], PARAMS, speculation=wish)[0]
        assert out.outputs[0].token_ids == plain.outputs[0].token_ids and out.error is None
    bare = engine(packaged, heads=[])
    assert not bare.engine.heads.heads and not bare.engine.storage.extra
    assert bare.generate(["The king"], PARAMS)[0].outputs[0].token_ids == plain.outputs[0].token_ids


def test_on_a_card_they_come_along_where_their_method_is_asked_for() -> None:
    card, processor = torch.device("cuda"), torch.device("cpu")
    assert all(comes_along(processor, parse(wish)) for wish in (None, "auto", "dspark"))
    assert comes_along(card, parse({"method": "dspark", "k": 3}))
    assert not any(comes_along(card, parse(wish)) for wish in (None, "auto", "ngram"))


def test_who_names_a_head_gets_that_one(packaged: Path) -> None:
    place = str(FAMILY / "dspark")
    assert list(engine(packaged, heads=[place]).engine.heads.heads) == [place]
    named = engine(packaged, speculation={"method": "dspark", "head": place})
    assert list(named.engine.heads.heads) == [place]
    assert list(engine(packaged, heads=["tiny/dspark"]).engine.heads.heads) == ["tiny/dspark"]
    for nobody in ("tiny/eagle3", "tiny/..", "tiny"):
        with pytest.raises((ModelNotFoundError, ModelFormatError)):
            engine(packaged, heads=[nobody])


@pytest.mark.parametrize("other", [
    {"paceline": {"tokenizer": "another"}}, {"paceline": {}}, {"transformer_layer_config": {"hidden_size": 64}}])
def test_heads_of_other_models_are_not_looked_at(other: dict[str, Any], packaged: Path, caplog: Any) -> None:
    edit(packaged / "tiny" / "dspark", **other)
    assert not engine(packaged).engine.heads.heads and not caplog.messages


def test_of_two_that_fit_the_one_of_the_models_name_is_taken(packaged: Path) -> None:
    shutil.copytree(packaged / "tiny", packaged / "another")
    assert list(engine(packaged).engine.heads.heads) == ["another/dspark"]
    target = engine(packaged, heads=[]).engine
    fingerprint = target.tokenizer.fingerprint
    assert list(packaged_heads(packaged, target.model.config, fingerprint, "tiny")) == ["tiny/dspark"]


@pytest.mark.parametrize("broken", ["file", "run"])
def test_one_that_cannot_run_is_left_out_unless_it_was_asked_for(broken: str, packaged: Path, caplog: Any,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "file":
        file = packaged / "tiny" / "dspark" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        def fails(*_: Any) -> None:
            raise NotImplementedError("no such kernel")
        monkeypatch.setattr(BlockHead, "open", fails)
    llm = engine(packaged)
    assert not llm.engine.heads.heads and llm.generate(["The king"], PARAMS)[0].error is None
    assert sum("tiny/dspark, which comes with Paceline, is left out" in line for line in caplog.messages) == 1
    with pytest.raises((ModelFormatError, ConfigError)):
        engine(packaged, heads=["tiny/dspark"])


def test_what_the_command_line_says_of_heads() -> None:
    assert cli_options.heads(None) is None and cli_options.heads(["none"]) == ()
    assert cli_options.heads(["a", "b"]) == ("a", "b")
    with pytest.raises(ConfigError, match="none alone"):
        cli_options.heads(["none", "a"])


def test_what_is_packaged_belongs_to_a_model_that_is_known_and_is_small() -> None:
    assert sum(file.stat().st_size for file in PACKAGED_HEADS.rglob("*") if file.is_file()) <= MOST_BYTES
    places = [config.parent for config in PACKAGED_HEADS.glob("*/*/config.json")]
    assert {place.parent.name for place in places} <= set(PACKAGED_MODELS)
    for place in places:
        raw = json.loads((place / "config.json").read_text())
        assert raw["speculators_model_type"] == place.name and raw["paceline"]["tokenizer"]


def test_what_is_packaged_is_read_for_its_models_shape() -> None:
    """Of the model nothing is needed but its shape."""
    places = [config.parent for config in PACKAGED_HEADS.glob("*/*/config.json")]
    assert "smollm2-135m/dspark" in [f"{place.parent.name}/{place.name}" for place in places]
    for place in places:
        found = read_head(place, config_of(place.parent.name))
        assert (found.config.kind, found.config.target) == (place.name, place.parent.name)
        # Kernels of every backend take fc in floats, whatever it is stored as.
        assert all(tensor.dtype == torch.float32 for name, tensor in found.tensors.items() if name not in MAPS)
