"""`paceline train prune`: what counts least of a target goes, and what is left drafts for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import LLM, SamplingParams
from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.models.load.opening import open_checkpoint
from paceline.models.registry import read_config
from paceline.training.networks.llama import Layer
from paceline.training.networks.parts import Rotation
from paceline.training.prompts import read_prompts
from paceline.training.prune import Scores, cut, largest, look, prune, read_layer, smaller, whole_shape
from paceline.training.run import train

TEXTS = [[5, 9, 17, 33, 2, 8, 11], [40, 3, 3, 21, 60], [7]]


def scored(folder: Path) -> list[Scores]:
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        shape = whole_shape(_config(folder))
        return list(look(checkpoint, shape, TEXTS, torch.device("cpu")))


def _config(folder: Path) -> Any:
    return read_config(json.loads((folder / "config.json").read_text()))


@pytest.fixture
def changed(target_folder: Path, tmp_path: Path) -> Any:
    """The target with other weights or another config."""

    def make(change: Any = None, **config: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(target_folder, folder)
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        if change is not None:
            change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | config))
        return folder

    return make


def test_pruning_nothing_gives_the_targets_own_logits(options: Any, target_folder: Path) -> None:
    """In float32 to the last digits; what is written is rounded to fp16, as draft models are."""
    report = train(options("prune", steps=None, layers=4, heads=4, width=96), print)
    assert report["layers"] == [0, 1, 2, 3] and report["steps"] == 0
    score = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    ours, theirs = ([one.raw for out in LLM(str(model), deterministic=True, device="cpu", kernels="reference").generate(
        TEXTS[:2], score) for one in (out.prompt_logprobs or []) if one] for model in (report["head"], target_folder))
    assert len(ours) == 10
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=0.02, rtol=0.0)
    whole = prune(target_folder, ["fox river"], options("prune", layers=4))
    with open_checkpoint(target_folder) as checkpoint:
        assert all(torch.equal(one, checkpoint.tensor(f"model.{name}")) for name, one in whole.tensors.items())


def test_a_layer_that_does_nothing_goes_first(changed: Any, options: Any) -> None:
    def idle(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.2.{name}.weight"].zero_()

    folder = changed(idle)
    found = scored(folder)
    assert found[2].turned == pytest.approx(0.0, abs=1e-6) and min(found[layer].turned for layer in (0, 1, 3)) > 0.01
    left = prune(folder, ["fox river", "owl hill road"], options("prune", layers=3))
    assert left.layers == [0, 1, 3] and left.shape.num_layers == 3
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(left.tensors["layers.2.mlp.up_proj.weight"],
                           checkpoint.tensor("model.layers.3.mlp.up_proj.weight"))


def test_heads_and_features_that_add_nothing_go_first(changed: Any, options: Any) -> None:
    """And a model without them says what it said with them."""
    def quiet(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(4):
            group = layer % 2
            tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:, 24 * group:24 * group + 24] = 0.0
            tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, group::3] = 0.0

    folder = changed(quiet)
    for layer, scores in enumerate(scored(folder)):
        assert scores.groups.argmin() == layer % 2 and scores.groups.min() == 0.0 < scores.groups.max()
        assert not scores.features[layer % 2::3].any() and (scores.features > 0).sum() == 64
    left = prune(folder, ["fox river"], options("prune", heads=2, width=64))
    assert (left.shape.num_heads, left.shape.num_kv_heads, left.shape.intermediate_size) == (2, 1, 64)
    x = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(1))
    places = torch.arange(9)[None]
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        whole, rotate = whole_shape(_config(folder)), Rotation(left.shape, 16, torch.device("cpu"))
        layer = Layer(left.shape)
        layer.load_state_dict({name.removeprefix("layers.1."): one for name, one in left.tensors.items()
                               if name.startswith("layers.1.")})
        torch.testing.assert_close(layer(x, places, rotate), read_layer(checkpoint, whole, 1)(x, places, rotate))


def test_groups_stay_whole(target_folder: Path, options: Any) -> None:
    """Query heads 2 and 3 share key head 1: they stay together, in their places."""
    shape = smaller(options("prune", heads=2, width=2), whole_shape(_config(target_folder)))
    features = torch.zeros(96)
    features[[70, 5]] = torch.tensor([2.0, 1.0])
    with open_checkpoint(target_folder) as checkpoint:
        layer = read_layer(checkpoint, whole_shape(_config(target_folder)), 0)
    left = cut(layer, Scores(1.0, torch.tensor([0.1, 0.2]), features), shape)
    attention, mlp = layer.self_attn, layer.mlp
    assert torch.equal(left["self_attn.q_proj.weight"], attention.q_proj.weight[24:])
    assert torch.equal(left["self_attn.v_proj.weight"], attention.v_proj.weight[12:])
    assert torch.equal(left["self_attn.o_proj.weight"], attention.o_proj.weight[:, 24:])
    assert torch.equal(left["mlp.gate_proj.weight"], mlp.gate_proj.weight[[5, 70]])
    assert torch.equal(left["mlp.down_proj.weight"], mlp.down_proj.weight[:, [5, 70]])
    assert largest(torch.tensor([1.0, 2.0, 1.0]), 2).tolist() == [0, 1]


def test_what_is_left_is_distilled_and_drafts(options: Any, target_folder: Path) -> None:
    chosen = options("prune", steps=16, layers=3, width=80, answers=24)
    report = train(chosen, lambda news: None)
    assert report["steps"] == 16 and report["head"] == str(chosen.out / "model")
    wish = {"method": "draft", "model": report["head"], "k": 3, "adaptive": False}
    llm = LLM(str(target_folder), device="cpu", kernels="reference", deterministic=True)
    prompts = [llm.render([{"role": "user", "content": prompt}]) for prompt in read_prompts(chosen.data)[:4]]
    params = [SamplingParams(max_tokens=16, temperature=0.5 * (seed % 2), seed=seed) for seed in range(4)]
    plain = llm.generate(prompts, params, speculation=None)
    outs = llm.generate(prompts, params, speculation=wish)
    assert [out.outputs[0].token_ids for out in outs] == [out.outputs[0].token_ids for out in plain]
    stats = [out.speculation for out in outs]
    assert all(one is not None and one.failure is None for one in stats)
    assert sum(one.accepted for one in stats if one is not None) > 4


@pytest.mark.parametrize(("wrong", "says"), [
    ({"layers": 5}, "this target has 4, not 5"), ({"heads": 3}, "multiple of 2, got 3"),
    ({"heads": 6}, "has 4, not 6"), ({"width": 97}, "has 96, not 97"), ({}, "nothing to prune"),
    ({"layers": 0}, "at least 1"), ({"layers": 2, "data": (), "self_made": 9}, "needs to see the target"),
    ({"layers": 2, "intermediate": 8}, "say with --width"), ({"layers": 2, "init": Path("x")}, "--init is for heads")])
def test_nonsense_is_refused(options: Any, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(options("prune", **wrong), print)


def test_only_prune_prunes_and_only_llamas(options: Any, changed: Any) -> None:
    with pytest.raises(ConfigError, match="--heads is what `paceline train prune` keeps"):
        train(options("draft", heads=2), print)
    folder = changed(rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ConfigError, match=r"Only targets of Llama's shape are pruned.*\(llama\) has another"):
        train(options("prune", model=str(folder), layers=2), print)


def test_the_command_prunes_without_training(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = options("prune")
    assert main(["train", "prune", "--model", chosen.model, "--data", str(chosen.data[0]), "--out", str(chosen.out),
                 "--layers", "2", "--device", "cpu"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "M parameters, of the target's layers" in told and (chosen.out / "model" / "config.json").is_file()
