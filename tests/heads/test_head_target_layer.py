"""MTP layers of the target's own kind (latent attention, experts) against transformers' own layers."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Hand, Rows
from head_models import DraftHand
from oracles import oracle
from safetensors.torch import save_file

from paceline.errors import ConfigError, ModelFormatError
from paceline.kernels import select
from paceline.models.heads.formats.read import load_head, read_head
from paceline.models.heads.formats.write import write_head

CPU = torch.device("cpu")
BACKENDS: dict[str, Any] = {"eager": select(False, CPU), "reference": select(True, CPU)}
NAMES = ["deepseek_v2-lite", "deepseek_v3", "qwen3_moe"]
TEXTS = [[5, 9, 3, 77, 12, 8, 41, 2, 19, 60, 33], [7, 7, 1]]


@cache
def mtp(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A layer like the target's last one with other weights, and what is around it."""
    theirs, source = oracle(name).theirs, torch.Generator().manual_seed(3)
    layer = copy.deepcopy(theirs.model.layers[-1])
    for key, parameter in (*layer.named_parameters(), *layer.named_buffers()):
        fresh = torch.randn(parameter.shape, generator=source) * (0.3 if parameter.dim() < 2 else 0.15)
        parameter.data.copy_(1 + fresh if "norm" in key else fresh)
    hidden = theirs.config.hidden_size
    around = {"eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=source) * 0.1}
    around |= {f"{norm}.weight": 1 + torch.randn(hidden, generator=source) * 0.3
               for norm in ("enorm", "hnorm", "shared_head.norm")}
    return layer, around


def stored(name: str) -> dict[str, torch.Tensor]:
    layer, around = mtp(name)
    layers = oracle(name).ours.config.num_layers
    return {f"model.layers.{layers}.{key}": tensor.detach().clone().contiguous()
            for key, tensor in (*layer.state_dict().items(), *around.items())}


def folder(path: Path, name: str, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(oracle(name).raw | {"num_nextn_predict_layers": 1}))
    layers = oracle(name).ours.config.num_layers
    experts = {}
    for key, tensor in tensors.items():  # newer transformers keep all experts of a layer in two tensors
        if key.endswith("mlp.experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                experts |= {f"model.layers.{layers}.mlp.experts.{index}.gate_proj.weight": gate.contiguous().clone(),
                            f"model.layers.{layers}.mlp.experts.{index}.up_proj.weight": up.contiguous().clone()}
        elif key.endswith("mlp.experts.down_proj"):
            experts |= {f"model.layers.{layers}.mlp.experts.{index}.down_proj.weight": one.contiguous().clone()
                        for index, one in enumerate(tensor)}
        else:
            experts[key] = tensor
    save_file(experts, path / "model.safetensors")
    return path


@torch.inference_mode()
def published(name: str, tokens: list[int], drafted: list[int], kernels: Any) -> torch.Tensor:
    found = oracle(name)
    layer, around = mtp(name)
    around = {key: tensor.double() for key, tensor in around.items()}
    hand = Hand(found.ours, kernels)
    layers = found.ours.config.num_layers
    context = hand.forward([Rows(hand.new(), tokens[:-1])], frozenset({layers}))
    found.ours.forward(torch.tensor(tokens[:-1]), context)
    eps = found.theirs.config.rms_norm_eps

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    features = rms(context.tapped[layers].double(), found.theirs.model.norm.weight.double())
    embedding, head = found.theirs.model.embed_tokens.weight.double(), found.theirs.lm_head.weight.double()
    after, logits = tokens[1:], []
    for step in range(len(drafted) + 1):
        both = (rms(embedding[after], around["enorm.weight"]), rms(features, around["hnorm.weight"]))
        x = torch.cat(both, dim=-1) @ around["eh_proj.weight"].T
        places = torch.arange(len(after))[None]
        single = x.float()[None]  # transformers' experts know no float64
        turned = found.theirs.model.rotary_emb(single, places)
        mask = torch.full((len(after), len(after)), -torch.inf).triu(1)[None, None]
        out = layer(single, attention_mask=mask, position_ids=places, position_embeddings=turned)
        out = (out[0] if isinstance(out, tuple) else out)[0, -1:].double()
        feature = rms(out, around["shared_head.norm.weight"])
        logits.append(feature @ head.T)
        features, after = torch.cat((features, feature)), [*after, *drafted[step:step + 1]]
    return torch.cat(logits)


@pytest.mark.parametrize("kernels", list(BACKENDS.values()), ids=list(BACKENDS))
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_layer_itself(name, kernels, tmp_path):
    target: Any = oracle(name).ours
    head = load_head(folder(tmp_path / "model", name, stored(name)), target, 128)
    assert head.config.target_layer and not head.capturable
    drafted = [[4, 11], [50, 2]]
    for chunk in (99, 3):
        hand = DraftHand(target, head, kernels)
        seqs = [hand.new() for _ in TEXTS]
        for begin in range(0, 10, chunk):
            rows = [Rows(seq, tokens[begin:min(begin + chunk, len(tokens) - 1)]) for seq, tokens in zip(seqs, TEXTS)]
            hand.step([group for group in rows if group.tokens])
        logits, _ = hand.draft(seqs, [tokens[-1] for tokens in TEXTS], drafted)
        for index, tokens in enumerate(TEXTS):
            expected = published(name, tokens, drafted[index], kernels)
            torch.testing.assert_close(logits[index].double(), expected, atol=1e-3, rtol=1e-3)


def test_what_is_missing_or_too_much_is_named(tmp_path):
    name, target = "deepseek_v3", oracle("deepseek_v3").ours
    layers = target.config.num_layers
    key = f"model.layers.{layers}.self_attn.kv_b_proj.weight"
    without = {other: tensor for other, tensor in stored(name).items() if other != key}
    with pytest.raises(ModelFormatError, match="kv_b_proj"):
        load_head(folder(tmp_path / "less", name, without), target, 128)  # type: ignore[arg-type]
    more = stored(name) | {f"model.layers.{layers}.self_attn.sinks": torch.ones(3)}
    with pytest.raises(ModelFormatError, match="sinks"):
        load_head(folder(tmp_path / "more", name, more), target, 128)  # type: ignore[arg-type]


def test_it_stays_in_the_targets_checkpoint(tmp_path):
    name = "deepseek_v3"
    found = read_head(folder(tmp_path / "model", name, stored(name)), oracle(name).ours.config)
    with pytest.raises(ConfigError, match="stays in the target's checkpoint"):
        write_head(tmp_path / "head", found.config, found.tensors)
