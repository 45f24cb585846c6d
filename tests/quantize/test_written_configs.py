"""What paceline quantize writes into config.json, as other programs read it: which modules stayed in floats."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import write_folder
from rounded_models import BASE, TEXT, names_of, tiny_folder
from safetensors.torch import load_file

from paceline.models.load import open_checkpoint
from paceline.quantize.plan import Job
from paceline.quantize.run import quantize

TARGETS = ("int8", "int4", "awq")


def rounded(tmp_path: Path, model: Path, to: str) -> Path:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    job = Job(model=str(model), to=to, out=tmp_path / "out", text=text if to == "awq" else None,
              calibration_tokens=60, measured_tokens=2)
    return quantize(job, lambda *report: None).out


def settings(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return said


def named(folder: Path) -> list[str]:
    said = settings(folder)
    modules: list[str] = said["ignore" if said["quant_method"] == "compressed-tensors" else "modules_to_not_convert"]
    return modules


@pytest.mark.parametrize("to", TARGETS)
def test_modules_in_floats_are_named_as_the_model_calls_them(tmp_path: Path, to: str) -> None:
    folder = rounded(tmp_path, tiny_folder(tmp_path / "m", intermediate_size=80), to)
    unfit = [] if to == "int8" else [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert sorted(named(folder)) == sorted(["lm_head", "model.embed_tokens", *unfit])


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_routers_are_named_and_the_experts_beside_them_are_not(tmp_path: Path, to: str) -> None:
    layer = "model.layers.0.mlp."
    routers = [f"{layer}gate", f"{layer}shared_expert_gate"]
    experts = [f"{layer}experts.0.gate_proj", f"{layer}shared_expert.gate_proj", "model.layers.1.mlp.gate_proj"]
    tensors = {f"{module}.weight": torch.ones(8, 32) for module in [*routers, *experts, "lm_head"]}
    folder = rounded(tmp_path, write_folder(tmp_path / "m", BASE | {"vocab_size": 8}, [tensors]), to)
    assert sorted(named(folder)) == sorted([*routers, "lm_head"])


@pytest.mark.parametrize("to", TARGETS)
def test_transformers_would_make_quantised_layers_of_exactly_those_that_are(tmp_path: Path, to: str) -> None:
    """Its linear layers by name, and the rule of each format's readers: equal names, patterns, or transformers' own."""
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = tiny_folder(tmp_path / "m", intermediate_size=80)
    folder = rounded(tmp_path, model, to)
    said, stored = settings(folder), load_file(folder / "model.safetensors")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    linears = [name for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 15, "seven in each of two layers, and the head"
    for name in linears:
        skipped = {"int8": lambda name: name in said["ignore"],
                   "int4": lambda name: any(re.match(key.removeprefix("-:"), name) for key in said["dynamic"]),
                   "awq": lambda name: not should_convert_module(name, said["modules_to_not_convert"])}[to](name)
        assert skipped != (f"{name}.weight_scale" in stored or f"{name}.qweight" in stored), name


@pytest.mark.parametrize("to", ["int4", "awq"])
def test_transformers_takes_the_config(tmp_path: Path, to: str) -> None:
    """compressed-tensors' needs the package of that name."""
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers.auto import AutoQuantizationConfig

    folder = rounded(tmp_path, tiny_folder(tmp_path / "m"), to)
    taken = AutoQuantizationConfig.from_dict(transformers.AutoConfig.from_pretrained(folder).quantization_config)
    assert (taken.bits, taken.group_size) == (4, 32)
    if to == "awq":
        assert taken.modules_to_not_convert == named(folder)


@pytest.mark.parametrize("to", TARGETS)
def test_the_names_change_nothing_of_what_paceline_reads(tmp_path: Path, to: str) -> None:
    folder = rounded(tmp_path, tiny_folder(tmp_path / "m", intermediate_size=80), to)
    with open_checkpoint(folder) as checkpoint:
        shapes = names_of(checkpoint.config)
        before = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    assert {name: tuple(tensor.shape) for name, tensor in before.items()} == shapes
    config = json.loads((folder / "config.json").read_text())
    for key in ("ignore", "modules_to_not_convert", "dynamic"):
        config["quantization_config"].pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in before.items())
