"""Checkpoints of heads: written and read again, read as others write them, and refused where they are wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Rows
from head_models import (
    CONFIGS,
    LAYERS,
    MAX_LEN,
    TARGET,
    VOCAB,
    DraftHand,
    choices,
    longest,
    seen,
    target,
    tensors,
    tensors_of,
    text,
)
from published import Published
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError, ModelFormatError, ModelNotFoundError
from paceline.kernels import select
from paceline.models.config import ModelConfig
from paceline.models.heads.build import build_head
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.formats.read import load_head, read_head
from paceline.models.heads.formats.write import GROUP, rounded, write_head
from paceline.models.heads.tensors import MTP, expected

EAGER = select(False, torch.device("cpu"))
SHAPE = ModelConfig.from_dict(TARGET)
NAMES = pytest.mark.parametrize("name", sorted(CONFIGS))
LAYER = {key: TARGET[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                      "head_dim", "max_position_embeddings", "rms_norm_eps", "vocab_size")}


def folder(path: Path, raw: dict[str, Any], stored: dict[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, path / file)
    else:
        torch.save(stored, path / file)
    return path


def drafts(head: Any) -> torch.Tensor:
    """Logits of one round behind a text."""
    hand, tokens = DraftHand(target(), head, EAGER), text(6, 14)
    seq = hand.new()
    hand.step([Rows(seq, tokens[:-1])])
    return hand.draft([seq], [tokens[-1]], choices([seq], longest(head.config)))[0]


def same_drafts(path: Path, name: str) -> None:
    """The head in this folder drafts what the one in memory does."""
    config = CONFIGS[name]
    wanted = drafts(build_head(config, tensors(name), target(), MAX_LEN))
    assert torch.equal(drafts(load_head(path, target(), MAX_LEN)), wanted)


# ---------------------------------------------------------------- our own


@NAMES
def test_what_was_written_is_read_again(name, tmp_path):
    config = replace(CONFIGS[name], speculative_tokens=4, tokenizer="abc", target="someone/model", window=96)
    write_head(tmp_path / "head", config, tensors(name), storage="float32")
    found = read_head(tmp_path / "head", SHAPE)
    assert found.config == config
    assert found.tensors.keys() - {"t2d"} == tensors(name).keys()
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in tensors(name).items())
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["head"]
    same_drafts(tmp_path / "head", name)


@NAMES
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "int8"])
def test_smaller_storage_drafts_nearly_the_same(name, storage, tmp_path):
    write_head(tmp_path / "small", CONFIGS[name], tensors(name), storage=storage)
    write_head(tmp_path / "whole", CONFIGS[name], tensors(name), storage="float32")
    sizes = {kind: (tmp_path / kind / "model.safetensors").stat().st_size for kind in ("small", "whole")}
    assert sizes["small"] < 0.6 * sizes["whole"]
    whole, small = (drafts(load_head(tmp_path / kind, target(), MAX_LEN)) for kind in ("whole", "small"))
    assert 0 < (small - whole).pow(2).mean().sqrt() / whole.std() < 0.05


def test_int8_is_codes_with_a_scale_per_row(tmp_path):
    write_head(tmp_path / "head", CONFIGS["dspark"], tensors("dspark"), storage="int8")
    stored, raw = load_file(tmp_path / "head" / "model.safetensors"), json.loads(
        (tmp_path / "head" / "config.json").read_text())
    name = "layers.0.mlp.down_proj.weight"
    codes, scale = stored[name], stored[f"{name}_scale"]
    assert codes.dtype == torch.int8 and scale.shape == (codes.shape[0], 1) and scale.dtype == torch.bfloat16
    assert (codes * scale.float() - tensors("dspark")[name]).abs().max() <= scale.max() / 2 + 1e-6
    assert (codes.abs().amax(1) == 127).all()
    assert stored["norm.weight"].dtype == torch.float16
    # Differences of ids below 128: a byte each holds them.
    assert stored["d2t"].dtype == torch.int8 and stored["t2d"].sum() == CONFIGS["dspark"].draft_vocab_size
    assert torch.equal(stored["d2t"].long(), tensors("dspark")["d2t"])
    assert raw["quantization_config"]["format"] == "int-quantized"
    assert raw["speculators_model_type"] == "dspark"
    zeros = rounded(torch.zeros(3, 4))
    assert not zeros[0].any() and not zeros[1].any()


def test_int8_has_a_scale_for_columns_of_like_size_in_fc(tmp_path):
    write_head(tmp_path / "head", CONFIGS["dspark"], tensors("dspark"), storage="int8")
    stored, raw = load_file(tmp_path / "head" / "model.safetensors"), json.loads(
        (tmp_path / "head" / "config.json").read_text())["quantization_config"]
    codes, scale, group_of = (stored[f"fc.{part}"] for part in ("weight", "weight_scale", "weight_g_idx"))
    rows, columns = codes.shape
    assert (codes.dtype, scale.dtype, group_of.dtype) == (torch.int8, torch.bfloat16, torch.int32)
    assert scale.shape == (rows, columns // GROUP) and (group_of.bincount() == GROUP).all()
    kept = read_head(tmp_path / "head", SHAPE).tensors["fc.weight"]
    assert torch.equal(kept, codes * scale.float()[:, group_of]) and kept.dtype == torch.float32
    assert ((kept - tensors("dspark")["fc.weight"]).abs() <= scale.float()[:, group_of] / 2 + 1e-6).all()
    groups = [group for group in raw["config_groups"].values() if group["targets"] == ["fc"]]
    assert [(group["weights"]["strategy"], group["weights"]["group_size"], group["weights"]["actorder"])
            for group in groups] == [("group", GROUP, "group")]
    assert "fc" not in raw["ignore"]


def test_int8_keeps_streams_of_very_different_sizes_apart(tmp_path):
    """The last layers' streams are a hundred times the first ones', and what reads them is as much smaller. So are
    some features of each, between others."""
    name, source = "dspark", tensors("dspark")
    sizes = torch.tensor([100.0, 0.01]).repeat_interleave(64)
    sizes[1::4] /= 300
    uneven = source | {"fc.weight": source["fc.weight"] * sizes}
    write_head(tmp_path / "head", CONFIGS[name], uneven, storage="int8")
    kept = read_head(tmp_path / "head", SHAPE).tensors["fc.weight"]
    for size in sizes.unique():
        part = sizes == size
        error = (kept[:, part] - uneven["fc.weight"][:, part]).norm() / uneven["fc.weight"][:, part].norm()
        assert error < 0.02


def test_columns_that_make_no_groups_stay_in_floats(tmp_path):
    """Groups are all of one size."""
    config = replace(CONFIGS["eagle1"], hidden_size=60, num_heads=3, num_kv_heads=1, head_dim=20)
    luck = torch.Generator().manual_seed(3)
    made = {key: torch.randn(shape, generator=luck) for key, shape in expected(config).items()}
    write_head(tmp_path / "head", config, made, storage="int8")
    stored, raw = load_file(tmp_path / "head" / "model.safetensors"), json.loads(
        (tmp_path / "head" / "config.json").read_text())["quantization_config"]
    assert stored["fc.weight"].dtype == torch.float16 and raw["ignore"] == ["fc"]
    assert torch.equal(stored["fc.weight"], made["fc.weight"].half())
    assert [group["targets"] for group in raw["config_groups"].values()] == [["Linear"]]


@pytest.mark.parametrize(("what", "sentence"), [
    ({"drop": "fc.weight_scale"}, r"'fc\.weight'.*stored as I8"),
    ({"drop": "fc.weight_g_idx"}, r"'fc\.weight_g_idx'.*groups"),
    ({"add": {"fc.weight_g_idx": torch.full((128,), 8, dtype=torch.int32)}}, "groups outside of the 8"),
    ({"add": {"fc.weight_g_idx": torch.zeros(127, dtype=torch.int32)}}, r"fc\.weight_g_idx.*\[127\].*\[128\]"),
    ({"add": {"fc.weight_scale": torch.ones(64, 4)}}, r"fc\.weight_scale.*groups of 16"),
    ({"add": {"fc.weight_scale": torch.ones(63, 8)}}, r"fc\.weight_scale.*\[63, 8\]"),
    ({"add": {"fc.weight_scale": torch.full((64, 8), torch.nan)}}, "not numbers"),
    ({"add": {"d2t": torch.full((40,), 90, dtype=torch.int8)}}, "'d2t'.*ascending"),
])
def test_broken_heads_in_int8_are_refused(what, sentence, tmp_path):
    write_head(tmp_path / "head", CONFIGS["dspark"], tensors("dspark"), storage="int8")
    edit(tmp_path / "head", **what)
    with pytest.raises(ModelFormatError, match=sentence):
        read_head(tmp_path / "head", SHAPE)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    import paceline.models.heads.formats.write as module
    config, path = CONFIGS["eagle3"], tmp_path / "head"
    with pytest.raises(ConfigError, match="stored as"):
        write_head(path, config, tensors("eagle3"), storage="int4")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fails)
        with pytest.raises(ConfigError, match="No space left"):
            write_head(path, config, tensors("eagle3"))
    assert not list(tmp_path.iterdir())
    write_head(path, config, tensors("eagle3"), storage="float32")
    with pytest.raises(ConfigError, match="is there already"):
        write_head(path, config, tensors("eagle3"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fails)
        with pytest.raises(ConfigError, match="No space left"):
            write_head(path, config, tensors("eagle3"), replace=True)
    same_drafts(path, "eagle3")
    changed = tensors("eagle3") | {"norm.weight": torch.ones(64)}
    write_head(path, config, changed, storage="float32", replace=True)
    assert torch.equal(read_head(path, SHAPE).tensors["norm.weight"], torch.ones(64))
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


def test_who_may_read_a_new_file_may_read_a_head(tmp_path):
    (tmp_path / "file").touch()
    write_head(tmp_path / "head", CONFIGS["eagle3"], tensors("eagle3"))
    modes = {file.stat().st_mode for file in (tmp_path / "file", *(tmp_path / "head").iterdir())}
    assert len(modes) == 1


def test_what_is_written_is_checked_first(tmp_path):
    for bad in ({"norm.weight": torch.ones(3)}, {"norm.weight": torch.full((64,), torch.nan)}):
        with pytest.raises(ModelFormatError, match=r"norm\.weight"):
            write_head(tmp_path / "head", CONFIGS["eagle3"], tensors("eagle3") | bad)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the speculators format as others write it


def test_eagle3_of_speculators(tmp_path):
    """Layers of the target by their INPUT; maps, embedding and what training leaves behind."""
    stored = tensors("eagle3") | {"verifier_lm_head.weight": torch.ones(40, 64), "t2d": t2d("eagle3")}
    raw = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.2.0",
           "transformer_layer_config": LAYER | {"model_type": "llama", "num_hidden_layers": 1, "use_cache": True},
           "draft_vocab_size": 40, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
           "speculators_config": {"algorithm": "eagle3", "proposal_methods": [
               {"proposal_type": "greedy", "speculative_tokens": 5}], "verifier": {"name_or_path": "x/y"}}}
    path = folder(tmp_path / "head", raw, stored)
    found = read_head(path, SHAPE).config
    assert (found.taps, found.speculative_tokens, found.target) == ((1, 2, 3), 5, "x/y")
    same_drafts(path, "eagle3")


def t2d(name: str) -> torch.Tensor:
    found = torch.zeros(VOCAB, dtype=torch.bool)
    found[torch.arange(40) + tensors(name)["d2t"]] = True
    return found


def test_taps_of_eagle3_where_nothing_is_said(tmp_path):
    deep = ModelConfig.from_dict(TARGET | {"num_hidden_layers": 30})
    raw = {"speculators_model_type": "eagle3", "draft_vocab_size": 40,
           "transformer_layer_config": LAYER | {"model_type": "llama", "num_hidden_layers": 1}}
    assert read_head(folder(tmp_path / "head", raw, tensors("eagle3")), deep).config.taps == (2, 15, 27)


@pytest.mark.parametrize("name", ["dspark", "dspark rnn", "dflash"])
def test_blocks_of_speculators(name, tmp_path):
    config = CONFIGS[name]
    raw = {"speculators_model_type": config.kind, "draft_vocab_size": config.draft_vocab_size,
           "transformer_layer_config": LAYER | {"model_type": "qwen3", "num_hidden_layers": config.num_layers,
                                                "attention_bias": config.attention_bias,
                                                "layer_types": ["full_attention"] * config.num_layers,
                                                "sliding_window": None},
           "aux_hidden_state_layer_ids": list(config.taps), "block_size": 5, "mask_token_id": 3,
           "target_hidden_size": 64, "sliding_window_non_causal": False}
    if config.kind == "dspark":
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type,
                "enable_confidence_head": config.confidence_head, "confidence_head_with_markov": True}
    same_drafts(folder(tmp_path / "head", raw, tensors(name)), name)


def test_eagle1_of_speculators(tmp_path):
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    stored = {next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)): tensor
              for name, tensor in tensors("eagle1").items()}
    raw = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False,
           "transformer_layer_config": LAYER | {"model_type": "llama", "num_hidden_layers": 1}}
    same_drafts(folder(tmp_path / "head", raw, stored), "eagle1")
    with pytest.raises(ModelFormatError, match="sets layernorms = True"):
        read_head(folder(tmp_path / "normed", raw | {"layernorms": True}, stored), SHAPE)


@pytest.mark.parametrize("rope", [
    {"rope_theta": 5000.0}, {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
    {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0},
     "rope_scaling": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}}])
def test_both_spellings_of_rotary_positions(rope, tmp_path):
    raw = {"speculators_model_type": "eagle3", "draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
           "transformer_layer_config": LAYER | {"model_type": "llama", "num_hidden_layers": 1} | rope}
    found = load_head(folder(tmp_path / "head", raw, tensors("eagle3")), target(), MAX_LEN).config
    scaled = "linear" in str(rope)
    assert found.rope_theta == 5000.0 and (found.rope_scaling is not None) == scaled
    write_head(tmp_path / "again", found, tensors("eagle3"))
    assert read_head(tmp_path / "again", SHAPE).config == replace(found, speculative_tokens=3)


def test_mtp_of_speculators(tmp_path):
    raw = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
           "transformer_layer_config": LAYER | {"model_type": "qwen3", "num_hidden_layers": LAYERS}}
    same_drafts(folder(tmp_path / "head", raw, tensors("mtp")), "mtp")


# ---------------------------------------------------------------- as their authors publish them


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_official_eagle3(file, tmp_path):
    stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors("eagle3").items()}
    raw = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
                   "draft_vocab_size": 40, "hidden_act": "silu", "bos_token_id": 1, "tie_word_embeddings": False,
                   "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}}
    same_drafts(folder(tmp_path / "head", raw, stored, file), "eagle3")


def test_official_eagle1(tmp_path):
    raw = LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "bias": True}
    path = folder(tmp_path / "head", raw, tensors("eagle1"), "pytorch_model.bin")
    assert read_head(path, SHAPE).config.kind == "eagle1"
    same_drafts(path, "eagle1")


DEEP = ModelConfig.from_dict(TARGET | {"num_hidden_layers": 6})
LEAVING = (0, 1, 3, 4, 5)
DEEPSPEC = LAYER | {
    "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_hidden_layers": 1, "hidden_act": "silu",
    "layer_types": ["full_attention"], "tie_word_embeddings": False, "attention_bias": False, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 6, "target_layer_ids": list(LEAVING), "ttt_length": 7,
    "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "num_target_layers": 6,
    "target_model_name_or_path": "x/y", "fc_norm": False}


def eagle3_of_deepspec() -> HeadConfig:
    """Five streams, norms of queries and keys, the whole vocabulary with the target's matrices stored once more."""
    return replace(CONFIGS["eagle3"], taps=(1, 2, 4, 5, 6), draft_vocab_size=VOCAB, qk_norm=True, own_embedding=True,
                   own_lm_head=True, target="x/y")


def test_eagle3_of_deepspec_drafts_what_was_published(tmp_path):
    """Its layers are named by their output. Read as inputs they would be others: drafts of those are far away."""
    config, model, tokens = eagle3_of_deepspec(), target(layers=6), text(6, 14)
    path = folder(tmp_path / "head", DEEPSPEC, tensors_of(config))
    assert read_head(path, DEEP).config == config
    write_head(tmp_path / "again", config, tensors_of(config), storage="float32")
    for where in (path, tmp_path / "again"):
        hand = DraftHand(model, load_head(where, model, MAX_LEN), EAGER)
        seq = hand.new()
        hand.step([Rows(seq, tokens[:-1])])
        chosen = choices([seq], 4)
        found = hand.draft([seq], [tokens[-1]], chosen)[0][0].double()
        right, off = (Published(replace(config, taps=taps), tensors_of(config),
                                seen(model, taps, tokens, EAGER)).draft(chosen[0])[0]
                      for taps in (config.taps, LEAVING))
        torch.testing.assert_close(found, right, atol=2e-4, rtol=1e-4)
        assert ((found - off).pow(2).mean().sqrt() / right.std()) > 0.1


@pytest.mark.parametrize(("change", "drop", "sentence"), [
    ({"fc_norm": True}, "", "sets fc_norm = True, which this version does not know"),
    ({"num_hidden_layers": 2, "layer_types": None}, "", "num_layers to be 1"),
    ({"target_layer_ids": [0, 1, 3, 4, 6]}, "", "reads layer 7 of its target.*has 6"),
    ({"target_layer_ids": [1, 3, 5]}, "", r"'fc\.weight'.*\[64, 320\].*\[64, 192\]"),
    ({}, "layers.0.hidden_norm.weight", r"lacks 'layers\.0\.hidden_norm\.weight'.*incomplete"),
])
def test_eagle3_of_deepspec_that_is_refused(change, drop, sentence, tmp_path):
    stored = {name: tensor for name, tensor in tensors_of(eagle3_of_deepspec()).items() if name != drop}
    with pytest.raises(ModelFormatError, match=sentence):
        read_head(folder(tmp_path / "head", DEEPSPEC | change, stored), DEEP)


@pytest.mark.parametrize("nested", [True, False])
def test_layers_of_official_dflash_are_named_by_their_output(nested, tmp_path):
    """Off by one they would be other layers: drafts would be bad, and nothing would say why."""
    config = replace(CONFIGS["dflash"], taps=(1, 2, 4))
    own = {"mask_token_id": 3, "target_layer_ids": [0, 1, 3]}
    raw = LAYER | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1,
                   "block_size": 5, "num_target_layers": LAYERS, "layer_types": ["full_attention"]}
    raw |= {"dflash_config": own} if nested else own
    path = folder(tmp_path / "head", raw, tensors("dflash"))
    assert read_head(path, SHAPE).config == replace(config, confidence_head_with_markov=True)
    assert torch.equal(drafts(load_head(path, target(), MAX_LEN)),
                       drafts(build_head(config, tensors("dflash"), target(), MAX_LEN)))


def test_official_dspark(tmp_path):
    name, source = "dspark gated", tensors("dspark gated")
    config = replace(CONFIGS[name], draft_vocab_size=VOCAB, taps=(2, 4), own_embedding=True, own_lm_head=True)
    stored = {key: tensor for key, tensor in source.items() if key != "d2t"} | {
        "markov_head.markov_w2.weight": source["markov_head.markov_w1.weight"].flip(0),
        "embed_tokens.weight": tensors("dflash")["embed_tokens.weight"],
        "lm_head.weight": tensors("dflash")["lm_head.weight"]}
    raw = LAYER | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
                   "block_size": 5, "mask_token_id": 3, "target_layer_ids": [1, 3], "num_anchors": 512,
                   "markov_rank": 32, "markov_head_type": "gated", "enable_confidence_head": True,
                   "confidence_head_with_markov": False, "num_target_layers": LAYERS}
    path = folder(tmp_path / "head", raw, stored)
    assert read_head(path, SHAPE).config == config
    expected = drafts(build_head(config, stored, target(), MAX_LEN))
    assert torch.equal(drafts(load_head(path, target(), MAX_LEN)), expected)


@pytest.mark.parametrize("said", [3, 2])
def test_official_medusa_has_the_heads_that_are_in_the_file(said, tmp_path):
    """The config of its first models says two, and there are five."""
    config = replace(CONFIGS["medusa"], draft_vocab_size=VOCAB)
    stored = {name: noise_like(name, tensor) for name, tensor in tensors("medusa").items() if name != "d2t"}
    raw = {"base_model_name_or_path": "x/y", "medusa_num_heads": said, "medusa_num_layers": 2,
           "transformers_version": "4.31.0"}
    path = folder(tmp_path / "head", raw, stored, "medusa_lm_head.pt")
    found = load_head(path, target(), MAX_LEN)
    assert found.config.heads == 3 and found.config.target == "x/y"
    assert torch.equal(drafts(found), drafts(build_head(config, stored, target(), MAX_LEN)))


@pytest.mark.parametrize(("name", "matrix"), [("medusa", "1.2"), ("hydra", "hydra_lm_head.1")])
def test_networks_have_matrices_of_their_own_all_of_them_or_none(name, matrix, tmp_path):
    write_head(tmp_path / "own", CONFIGS[name], tensors(name))
    raw = json.loads((tmp_path / "own" / "config.json").read_text())
    stored = {key: tensor for key, tensor in tensors(name).items() if not key.startswith(matrix)}
    with pytest.raises(ModelFormatError, match=f"lacks '{matrix}"):
        load_head(folder(tmp_path / "some", raw, stored), target(), MAX_LEN)
    tied = {key: tensor for key, tensor in tensors(f"{name} tied").items() if key != "d2t" or name == "medusa"}
    raw["draft_vocab_size"] = CONFIGS[name].draft_vocab_size
    found = load_head(folder(tmp_path / "none", raw, tied), target(), MAX_LEN)
    assert not found.config.own_lm_head and found.outs == [found.lm_head] * 3


def noise_like(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if not name.endswith(".2.weight") else torch.cat((tensor, tensor.flip(0), tensor))[:VOCAB]


def test_official_hydra(tmp_path):
    raw = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True,
           "base_model_name_or_path": "x/y"}
    same_drafts(folder(tmp_path / "head", raw, tensors("hydra"), "hydra_lm_head.pt"), "hydra")


MTP_NAMES = {
    "deepseek": {"input_proj": "eh_proj", "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
                 "final_layernorm": "shared_head.norm"},
    "qwen": {"input_proj": "fc", "token_layernorm": "pre_fc_norm_embedding", "hidden_layernorm": "pre_fc_norm_hidden",
             "final_layernorm": "norm"},
}


@pytest.mark.parametrize("layout", ["deepseek", "qwen", "mimo"])
def test_mtp_layers_in_a_models_own_checkpoint(layout, tmp_path):
    stored = {"model.embed_tokens.weight": torch.ones(4, 4), "model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}
    for name, tensor in tensors("mtp").items():
        part, _, end = name.removeprefix(f"{MTP}.").rpartition(".")
        if layout == "mimo":
            stored[f"model.{name}"] = tensor
        elif layout == "deepseek":
            stored[f"model.layers.{LAYERS}.{MTP_NAMES[layout].get(part, part)}.{end}"] = tensor
        elif part in MTP_NAMES[layout]:
            stored[f"mtp.{MTP_NAMES[layout][part]}.{end}"] = tensor
        else:
            stored[f"mtp.layers.0.{part}.{end}"] = tensor
    raw = LAYER | {"model_type": "llama", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    path = folder(tmp_path / "model", raw, stored)
    same_drafts(path, "mtp")
    if layout == "deepseek":
        own = {f"model.layers.{LAYERS}.{name}.weight": torch.rand(VOCAB, 64)
               for name in ("embed_tokens", "shared_head.head")}
        found = read_head(folder(tmp_path / "own", raw, stored | own), SHAPE)
        assert found.config.own_embedding and found.config.own_lm_head


def test_centred_norms_of_qwen_are_stored_without_the_one(tmp_path):
    stored = {}
    for name, tensor in tensors("mtp").items():
        part, _, end = name.removeprefix(f"{MTP}.").rpartition(".")
        new = MTP_NAMES["qwen"].get(part)
        stored[f"mtp.{new}.{end}" if new else f"mtp.layers.0.{part}.{end}"] = tensor - 1 if "norm" in name else tensor
    raw = LAYER | {"model_type": "qwen3_next", "num_hidden_layers": LAYERS, "mtp_num_hidden_layers": 1}
    found = read_head(folder(tmp_path / "model", raw, stored), SHAPE).tensors
    assert all(torch.allclose(found[name], tensor) for name, tensor in tensors("mtp").items())


def test_a_model_without_its_mtp_layer(tmp_path):
    raw = LAYER | {"model_type": "llama", "num_hidden_layers": LAYERS}
    path = folder(tmp_path / "model", raw, {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4)})
    with pytest.raises(ModelFormatError, match="holds no MTP layer"):
        read_head(path, SHAPE)


# ---------------------------------------------------------------- refused


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_head(tmp_path / "head", CONFIGS["eagle3"], tensors("eagle3"), storage="float32")
    return tmp_path / "head"


def edit(path: Path, change: dict[str, Any] | None = None, drop: str = "", add: dict[str, torch.Tensor] | None = None,
         layer: dict[str, Any] | None = None) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw["transformer_layer_config"] |= layer or {}
    (path / "config.json").write_text(json.dumps(raw | (change or {})))
    stored = load_file(path / "model.safetensors")
    stored.pop(drop, None)
    save_file(stored | (add or {}), path / "model.safetensors")


@pytest.mark.parametrize(("what", "sentence"), [
    ({"drop": "fc.weight"}, r"lacks 'fc\.weight'.*incomplete"),
    ({"drop": "d2t"}, "lacks 'd2t'"),
    ({"add": {"fc_norm.0.weight": torch.ones(64)}}, r"holds 'fc_norm\.0\.weight', of which its config says nothing"),
    ({"add": {"fc.weight": torch.ones(64, 64)}}, r"'fc\.weight'.*\[64, 64\].*\[64, 192\]"),
    ({"add": {"d2t": torch.zeros(40)}}, "'d2t'.*ascending"),
    ({"add": {"d2t": torch.full((40,), 90)}}, "'d2t'.*ascending"),
    ({"add": {"t2d": torch.zeros(VOCAB, dtype=torch.bool)}}, "do not name the same tokens"),
    ({"add": {"norm.weight": torch.full((64,), torch.inf)}}, "not numbers"),
    ({"change": {"norm_output": True}}, "sets norm_output = True, which this version does not know"),
    ({"change": {"fc_norm": True}}, "sets fc_norm = True"),
    ({"change": {"target_hidden_size": 128}}, "target_hidden_size differs"),
    ({"change": {"speculators_model_type": "peagle"}}, "'peagle' is not supported"),
    ({"change": {"norm_before_residual": "yes"}}, "must be true or false"),
    ({"change": {"draft_vocab_size": None}}, r"'norm\.weight'|lm_head|d2t"),
    ({"change": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "reads layer 9 of its target.*has 4"),
    ({"layer": {"sliding_window": 8, "layer_types": ["sliding_attention"]}}, "sliding window"),
    ({"layer": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
    ({"layer": {"num_hidden_layers": 2}}, "num_layers to be 1"),
    ({"layer": {"gate_scale": 3}}, "sets gate_scale = 3"),
    ({"layer": {"vocab_size": 97}}, "vocab_size 97, and the model's is 96: load the model it was trained for"),
    ({"layer": {"num_key_value_heads": 3}}, "multiple of num_kv_heads"),
])
def test_wrong_checkpoints_are_refused_with_a_sentence(what, sentence, written):
    edit(written, **what)
    with pytest.raises(ModelFormatError, match=re.compile(sentence, re.DOTALL)):
        read_head(written, SHAPE)


def test_a_head_of_another_target(written):
    for changes in ({"hidden_size": 128}, {"num_hidden_layers": 2}):
        with pytest.raises(ModelFormatError, match="load the model it was trained for"):
            read_head(written, ModelConfig.from_dict(TARGET | changes))


def test_a_head_of_another_tokenizer(tmp_path):
    write_head(tmp_path / "head", replace(CONFIGS["eagle3"], tokenizer="abc"), tensors("eagle3"))
    load_head(tmp_path / "head", target(), MAX_LEN, tokenizer="abc")
    load_head(tmp_path / "head", target(), MAX_LEN)
    with pytest.raises(ModelFormatError, match="another tokenizer"):
        load_head(tmp_path / "head", target(), MAX_LEN, tokenizer="xyz")


def test_truncated_files(written, tmp_path):
    data = (written / "model.safetensors").read_bytes()
    (written / "model.safetensors").write_bytes(data[:len(data) // 2])
    with pytest.raises(ModelFormatError, match="truncated or corrupt"):
        read_head(written, SHAPE)
    raw = LAYER | {"model_type": "llama", "num_hidden_layers": 1}
    path = folder(tmp_path / "eagle", raw, tensors("eagle1"), "pytorch_model.bin")
    data = (path / "pytorch_model.bin").read_bytes()
    (path / "pytorch_model.bin").write_bytes(data[:len(data) // 2])
    with pytest.raises(ModelFormatError, match="truncated"):
        read_head(path, SHAPE)
    torch.save([1, 2], path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="not a dictionary"):
        read_head(path, SHAPE)
    torch.save({"fc.weight": Path("x")}, path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="holds more than tensors"):
        read_head(path, SHAPE)


def test_folders_that_are_no_heads(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no draft head at"):
        read_head(tmp_path / "nothing", SHAPE)
    with pytest.raises(ModelFormatError, match=r"no config\.json"):
        read_head(tmp_path, SHAPE)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFormatError, match="does not hold an object"):
        read_head(tmp_path, SHAPE)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="no weights of a draft head"):
        read_head(tmp_path, SHAPE)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match="no format of draft heads that is known"):
        read_head(tmp_path, SHAPE)


@pytest.mark.parametrize(("raw", "sentence"), [
    ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0], "fc_layernorm": True}, "block_size": 5},
     "sets fc_layernorm"),
    ({"dflash_config": {"mask_token_id": 3}, "block_size": 5}, "no target_layer_ids"),
    ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]}, "block_size": 5, "sliding_window": 9,
      "layer_types": ["sliding_attention"]}, "sliding window"),
    ({"hydra_num_heads": 3, "hydra_head_arch": "prefix-mlp"}, "only Hydra's plain grounded heads"),
])
def test_official_checkpoints_that_are_refused(raw, sentence, tmp_path):
    known = {} if "hydra_num_heads" in raw else LAYER | {"model_type": "qwen3", "num_hidden_layers": 1}
    with pytest.raises(ModelFormatError, match=sentence):
        read_head(folder(tmp_path / "head", known | raw, tensors("dflash")), SHAPE)


def test_an_mtp_layer_of_another_kind_than_the_models(tmp_path):
    stored = {f"model.layers.{LAYERS}.self_attn.kv_a_proj_with_mqa.weight": torch.ones(4, 4)}
    raw = LAYER | {"model_type": "llama", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    with pytest.raises(ModelFormatError, match="latent attention or experts, and the model has neither"):
        read_head(folder(tmp_path / "model", raw, stored), SHAPE)
