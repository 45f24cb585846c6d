"""Trained heads are planned in the shape that they have: what they hold, what a draft reads of them, what they keep."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from engine.tiny import BASE, SHAPES, tiny_llm, tiny_model
from paceline.cli import plan as command
from paceline.cli.main import main
from paceline.engine.execute.target_heads import head_planes
from paceline.errors import ConfigError, ModelFormatError
from paceline.llm import LLM
from paceline.models.heads.config import KINDS, HeadConfig
from paceline.models.heads.packaged import PACKAGED_HEADS
from paceline.models.heads.tensors import expected
from paceline.plan.advice import advise
from paceline.plan.drafters import Drafter
from paceline.plan.find import find_drafter
from paceline.plan.hardware import Hardware, find_hardware
from paceline.plan.heads import HeadShape
from paceline.plan.known import find_shape
from paceline.plan.planner import plan
from paceline.plan.prompts import acceptance, at_hand, drafter_at_hand, wish
from paceline.plan.read import read_shape
from paceline.plan.shape import ModelShape
from paceline.plan.speculation import expected_tokens
from paceline.plan.trained import drafter_of
from speculation.trained_heads import head_config, random_head

FAMILY = Path(__file__).parents[1] / "family"
HEADS = ["dspark", "eagle3", "mtp", "medusa", "hydra"]
PACKAGED = "smollm2-135m/dspark"
READS = Hardware("it reads a byte a second and computes in no time", 1e12, 1.0, {"bfloat16": 1e300}, kind="cpu")
COMPUTES = Hardware("it computes a FLOP a second and reads in no time", 1e12, 1e300, {"bfloat16": 1.0}, kind="cpu")


def stored(folder: Path) -> dict[str, int]:
    """Numbers of each tensor that a network multiplies with: no scales, orders and maps between vocabularies."""
    with safe_open(folder / "model.safetensors", "np") as file:
        return {name: prod(file.get_slice(name).get_shape()) for name in file.keys()  # noqa: SIM118
                if not name.endswith(("_scale", "_g_idx", "d2t", "t2d"))}


def shape_of(drafter: Drafter) -> HeadShape:
    assert isinstance(drafter.shape, HeadShape)
    return drafter.shape


def read(drafter: Drafter, k: int, batch: int = 1, context: int = 0) -> float:
    """Bytes of a draft in 16 bits."""
    return drafter.cost(READS, "bfloat16", "bfloat16", batch, context, k)


def flops(drafter: Drafter, k: int, batch: int = 1) -> float:
    return drafter.cost(COMPUTES, "bfloat16", "bfloat16", batch, 0, k)


def test_the_packaged_head_holds_what_its_file_does() -> None:
    """Two layers and 16,384 tokens, not the five and 32,000 that were published."""
    target, sizes = find_shape("smollm2-135m"), stored(PACKAGED_HEADS / PACKAGED)
    found = find_drafter(PACKAGED, target)
    assert shape_of(found).parameters == sum(sizes.values())
    # The target's own rows for its tokens are copied beside it.
    assert found.weight_bytes("bfloat16") == 2 * (sum(sizes.values()) + 16_384 * 576)
    assert found.weight_bytes("int8") == sum(sizes.values()) + 2 * 16_384 * 576
    assert (shape_of(found).vocab, len(shape_of(found).passes[0]), found.most) == (16_384, 2, 7)
    assert found.acceptance == find_drafter("dspark", target).acceptance and "--prompts" in found.source


def test_a_draft_of_the_packaged_head_reads_its_own_matrices() -> None:
    """Layers and vocabulary once, the Markov head's matrix once for each token; of its table and of embeddings only
    rows; keys and values of the rows that the target has just computed."""
    sizes, found = stored(PACKAGED_HEADS / PACKAGED), find_drafter(PACKAGED, find_shape("smollm2-135m"))
    markov = sum(size for name, size in sizes.items() if "markov_w2" in name or "confidence" in name)
    keys = sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name)
    once = sum(sizes.values()) - sizes["markov_head.markov_w1.weight"] - markov + keys + 16_384 * 576
    places = 2 * 2 * 3 * 64 * 7  # its own block's rows in the cache of both layers
    for k in (1, 3, 7):
        assert read(found, k) == pytest.approx(2 * (once + k * markov + places))
    published = find_drafter("dspark", find_shape("smollm2-135m"))
    assert read(found, 7) < 0.65 * read(published, 7)


@pytest.mark.parametrize(("hardware", "dtype", "batch", "k", "measured"), [
    ("neoverse-n1-2cores", "int8", 1, 3, 3.0), ("h200", "bfloat16", 1, 7, 0.12), ("h200", "bfloat16", 8, 3, 0.175)])
def test_a_draft_takes_nearly_what_was_measured(hardware: str, dtype: str, batch: int, k: int, measured: float) -> None:
    """In ms (docs/benchmarks.md); the host's own work is in those figures and in no plan."""
    found = find_drafter(PACKAGED, find_shape("smollm2-135m"))
    planned = 1e3 * found.cost(find_hardware(hardware).sustained(), dtype, "float16", batch, 128, k)
    assert 0.5 < planned / measured < 1.0


def test_a_block_is_computed_whole_however_little_is_wanted() -> None:
    found = find_drafter(PACKAGED, find_shape("smollm2-135m"))
    per_token = flops(found, 2) - flops(found, 1)
    assert flops(found, 7) - flops(found, 1) == pytest.approx(6 * per_token)
    layers = sum(layer.parameters for layer in shape_of(found).passes[0])
    assert flops(found, 1) > 2 * 7 * layers


def test_its_window_bounds_what_it_reads_but_not_what_it_keeps() -> None:
    found = find_drafter(PACKAGED, find_shape("smollm2-135m"))
    assert read(found, 3, context=1024) == read(found, 3, context=8000) > read(found, 3, context=100)
    assert found.cache_bytes(8000, "bfloat16") == 8000 * 2 * (2 * 2 * 3 * 64)
    assert found.cache_bytes(100, "int8") == found.cache_bytes(100, "float16")  # planes of 8 bits are kept in 16


@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_the_family_hold_what_their_files_do(kind: str) -> None:
    found = find_drafter(str(FAMILY / kind), find_shape(str(FAMILY / "target")))
    sizes = stored(FAMILY / kind)
    assert shape_of(found).parameters == sum(sizes.values()) and shape_of(found).vocab == 512
    copied = 0 if kind in ("medusa", "hydra") else 512 * 128  # those two have matrices of their own
    assert found.weight_bytes("float16") == 2 * (sum(sizes.values()) + copied)


def test_a_token_of_a_chain_reads_its_layer_and_the_draft_vocabulary() -> None:
    sizes, found = stored(FAMILY / "eagle3"), find_drafter(
        str(FAMILY / "eagle3"), find_shape(str(FAMILY / "target")))
    fused = sizes["fc.weight"]  # made once of what the target leaves, not in every pass
    again = 2 * (sum(sizes.values()) - fused + 512 * 128 + 2 * 2 * 32)
    assert read(found, 5) - read(found, 4) == pytest.approx(again)
    keys = sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name)
    assert read(found, 1) == pytest.approx(again + 2 * (fused + keys))


def test_networks_run_as_far_as_tokens_are_wanted() -> None:
    target = find_shape(str(FAMILY / "target"))
    for kind, start in (("medusa", ("{}.",)), ("hydra", ("hydra_mlp.{}.", "hydra_lm_head.{}."))):
        sizes, found = stored(FAMILY / kind), find_drafter(str(FAMILY / kind), target)
        assert found.most == 3
        for k in (1, 2, 3):
            wanted = sum(size for name, size in sizes.items() if "lm_head" not in name or "bias" not in name
                         if name.startswith(tuple(part.format(head) for head in range(k) for part in start)))
            assert read(found, k) == pytest.approx(2 * wanted)


def test_medusa_with_the_target_s_matrix_reads_it_once_and_hydra_for_every_token() -> None:
    """As those are that are trained here (tests/family's bring matrices of their own)."""
    target, model = read_shape(BASE | SHAPES["llama"]), tiny_model()
    matrix = 2 * 61 * target.hidden
    for kind, times in (("medusa", 1), ("hydra", 3)):
        found = drafter_of(kind, head_config(kind, model), target)
        networks = 2 * (shape_of(found).parameters)
        assert read(found, 3) == pytest.approx(networks + times * matrix)
        assert found.weight_bytes("bfloat16") == networks + matrix


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_a_token_is_what_the_engine_keeps(kind: str) -> None:
    model = tiny_model()
    found = drafter_of(kind, head_config(kind, model), read_shape(BASE | SHAPES["llama"]))
    planes = head_planes({"it": random_head(kind, model)}, torch.float16, torch.float16)
    assert found.cache_bytes(10, "float16") == 10 * sum(plane.bytes_per_token for plane in planes)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_plan_of_its_own_parameters(kind: str, own: bool) -> None:
    model, target = tiny_model(), read_shape(BASE | SHAPES["llama"], "tiny")
    config = head_config(kind, model, own=own)
    found = drafter_of("mine", config, target)
    assert shape_of(found).parameters == sum(prod(shape) for name, shape in expected(config).items() if name != "d2t")
    made = plan(target, drafters=(found,))
    assert made.by_k[0].drafter == made.beside[0].drafter == "mine" and made.trees
    assert made.beside[0].weights == found.weight_bytes(target.dtype) > 0


def test_a_layer_of_the_target_s_own_kind_is_one_more_of_its_layers() -> None:
    target = find_shape("deepseek-v3")
    config = HeadConfig(kind="mtp", hidden_size=7168, vocab_size=129_280, draft_vocab_size=129_280, taps=(61,),
                        num_heads=128, num_kv_heads=128, head_dim=192, intermediate_size=18_432, target_layer=True)
    found = shape_of(drafter_of("mtp", config, target))
    layer = target.layers[-1]
    assert found.passes == ((layer,),) and found.parameters == layer.parameters + 2 * 7168**2 + 3 * 7168
    assert found.kept == 512 + 64 + 7168


@pytest.mark.parametrize("kind", HEADS)
def test_a_config_alone_is_enough(kind: str, tmp_path: Path) -> None:
    """What a config does not say is taken to be as heads are trained here: matrices of their own are the target's."""
    target = find_shape(str(FAMILY / "target"))
    shutil.copy(FAMILY / kind / "config.json", tmp_path)
    bare, whole = (shape_of(find_drafter(str(place), target)) for place in (tmp_path, FAMILY / kind))
    assert (bare.vocab, bare.passes, bare.kept) == (whole.vocab, whole.passes, whole.kept)
    of_their_own = {"medusa": 3 * 512 * 128, "hydra": 3 * 512 * 129}
    assert whole.parameters - bare.parameters == of_their_own.get(kind, 0)
    by_file = find_drafter(str(tmp_path / "config.json"), target)
    assert by_file.shape == bare


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "EAGLE-3": ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 32_000,
                 "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "intermediate_size": 14_336, "vocab_size": 128_256},
                # fc, a layer that reads two streams, four norms, and a matrix of its own
                3 * 4096**2 + 2 * 4096 * (4096 + 2048) + 4096**2 + 3 * 4096 * 14_336 + 4 * 4096 + 32_000 * 4096),
    "Medusa": ({"medusa_num_heads": 5, "medusa_num_layers": 1, "hidden_size": 4096, "vocab_size": 128_256},
               5 * (4096**2 + 4096 + 128_256 * 4096)),
    "DFlash": ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 15, 29]}, "block_size": 16,
                "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256},
               3 * 4096**2 + 2 * (2 * 4096**2 + 2048 * 4096 + 3 * 4096 * 14_336 + 2 * 4096) + 2 * 4096)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_authors_publish_them(name: str, tmp_path: Path) -> None:
    raw, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = find_drafter(str(tmp_path), find_shape("llama-3.1-8b"))
    assert shape_of(found).parameters == parameters


def test_a_head_on_the_hub_is_planned_by_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(self: Any, path: str, repo: str) -> tuple[Any, None]:
        asked.append(path)
        return PUBLISHED["EAGLE-3"][0], None

    monkeypatch.setattr("paceline.hub.client.Hub.json", answer)
    found = find_drafter("somebody/EAGLE3-of-llama", find_shape("llama-3.1-8b"))
    assert shape_of(found).parameters == PUBLISHED["EAGLE-3"][1] and found.name == "somebody/EAGLE3-of-llama"
    assert asked == ["somebody/EAGLE3-of-llama/resolve/main/config.json"]


def test_a_head_of_which_not_all_was_fetched_is_planned_by_its_config(tmp_path: Path) -> None:
    shutil.copy(FAMILY / "dspark" / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((FAMILY / "dspark" / "model.safetensors").read_bytes()[:1000])
    target = find_shape(str(FAMILY / "target"))
    assert find_drafter(str(tmp_path), target).shape == find_drafter(str(FAMILY / "dspark"), target).shape


def test_folders_of_models_are_draft_models_all_the_same() -> None:
    found = find_drafter(str(FAMILY / "draft"), find_shape(str(FAMILY / "target")))
    assert isinstance(found.shape, ModelShape) and found.name == "draft:draft"


@pytest.mark.parametrize(("target", "drafter", "wish"), [
    ("smollm2-135m", PACKAGED, {"method": "dspark", "head": PACKAGED}),
    ("smollm2-135m", "dspark", {"method": "dspark"}),
    ("llama-3.1-8b", "draft:llama-3.2-1b", {"method": "draft", "model": "llama-3.2-1b"})])
def test_what_is_advised_is_what_an_engine_takes(target: str, drafter: str, wish: dict[str, str]) -> None:
    told = [one.option for one in advise(plan(target, "h200", drafters=(drafter,), k=2))]
    assert f"speculation={json.dumps(wish | {'k': 2})}" in told


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="trained for a target with hidden_size 576"):
        plan("llama-3.1-8b", drafters=(PACKAGED,))
    (tmp_path / "config.json").write_text('{"speculators_model_type": "dspark"}')
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        find_drafter(str(tmp_path), find_shape("smollm2-135m"))
    for name in ("dspark:nothing", "no/such/head", "n" * 5000 + "/head"):
        with pytest.raises(ConfigError, match="There is no drafter"):
            find_drafter(name, find_shape("smollm2-135m"))


def test_a_folder_called_like_a_method_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FAMILY / "dspark", tmp_path / "my-dspark")
    monkeypatch.chdir(tmp_path)
    assert shape_of(find_drafter("my-dspark", find_shape(str(FAMILY / "target")))).vocab == 512


def test_the_command_plans_a_head_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--drafter", PACKAGED, "--drafter", "dspark", "--dtype", "int8", "--json"]) == 0
    own, published = json.loads(capsys.readouterr().out)["drafters"]
    assert own["drafter"] == PACKAGED and own["weights"] < 0.7 * published["weights"]


def with_heads(**named: str) -> LLM:
    model = tiny_model()
    return tiny_llm(model, trained={name: random_head(kind, model) for name, kind in named.items()},
                    max_batch_tokens=512)


def test_heads_at_hand_are_planned_as_they_are_loaded() -> None:
    llm, target = with_heads(mine="dspark", first="medusa", second="medusa"), read_shape(BASE | SHAPES["llama"])
    assert at_hand(llm) == ["ngram", "suffix", "dspark", "first", "second"]  # a kind alone would name two
    assert wish(llm, "dspark") == wish(llm, "mine") == {"method": "dspark", "head": "mine", "k": 7, "adaptive": False}
    assert wish(llm, "first")["head"] == "first" and wish(llm, "medusa")["head"] == "second"
    own = drafter_at_hand(llm, "dspark", target)
    assert own.shape == drafter_of("dspark", head_config("dspark", llm.engine.model), target).shape
    assert drafter_at_hand(llm, "eagle3", target).shape == find_drafter("eagle3", target).shape  # none is loaded
    with pytest.raises(ConfigError, match="name one with --head"):
        wish(llm, str(FAMILY / "dspark"))


def test_a_head_of_three_is_not_taken_to_be_wrong_about_four_more() -> None:
    """Asked for seven tokens, Medusa's three networks draft three: what they won is what three deep would win."""
    llm = LLM(str(FAMILY / "target"), heads=[str(FAMILY / "medusa")], device="cpu", max_model_len=256)
    found, = acceptance(llm, ["medusa"], ["The whale was white, and the sea"], max_tokens=48)
    assert 1.0 < found.tokens_per_step <= 4.0
    assert expected_tokens(found.acceptance, 3) == pytest.approx(found.tokens_per_step)


def test_prompts_put_the_loaded_head_s_acceptance_on_its_own_price(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | SHAPES["llama"]))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 2 3"}\n')
    from paceline.bench import spec

    monkeypatch.setattr(spec, "prompt_of", lambda llm, messages: [1, 2, 3])
    llm, target = with_heads(mine="dspark"), read_shape(BASE | SHAPES["llama"])
    monkeypatch.setattr(command, "load_llm", lambda model, **options: llm)
    assert main(["plan", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "12", "--dtype",
                 "bfloat16", "--json"]) == 0
    found = {one["drafter"]: one for one in json.loads(capsys.readouterr().out)["drafters"]}
    own = drafter_of("dspark", head_config("dspark", llm.engine.model), target)
    assert found["dspark"]["source"].startswith("measured: ")
    assert found["dspark"]["weights"] == own.weight_bytes("bfloat16")
    assert found["dspark"]["weights"] != find_drafter("dspark", target).weight_bytes("bfloat16")
