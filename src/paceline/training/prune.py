"""`paceline train prune`: a draft model, which is the target without its least important layers, heads and features.

What counts is seen on texts. A layer: how much it turns the stream, 1 - cosine of what enters and what leaves. The
query heads that share a key head, and a feature of a feed-forward: the mean size of what they add to the stream. One
layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from paceline.engine.build import choose_device
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.registry import read_config
from paceline.models.tokenizer import Tokenizer
from paceline.training import written
from paceline.training.loss import Judge
from paceline.training.networks.draft import DraftModel
from paceline.training.networks.llama import Layer, LlamaShape
from paceline.training.networks.parts import Rotation
from paceline.training.options import TrainOptions
from paceline.training.prompts import Prompt, plain_text

FAMILIES = ("llama", "mistral")
CALIBRATION = 16384
"""Tokens that are looked at."""
AT_ONCE = 4096
"""Rows of a pass, padding included."""


@dataclass(frozen=True)
class Scores:
    """What a layer was seen to do."""

    turned: float
    """1 - cosine of the streams that enter it and leave it."""
    groups: torch.Tensor
    """[key heads]: mean size of what the query heads of each add."""
    features: torch.Tensor
    """[width of the feed-forward]: the same."""


@dataclass(frozen=True)
class Pruned:
    shape: LlamaShape
    tensors: dict[str, torch.Tensor]
    """Of the layers that are left and the last norm, float32, by the names of a draft model's network."""
    layers: list[int]
    """Which of the target's they are."""

    def network(self, judge: Judge, slots: int) -> DraftModel:
        """To be distilled."""
        model = DraftModel(self.shape, judge, slots)
        model.take(self.tensors)
        return model


def prune(path: Path, prompts: Sequence[Prompt], options: TrainOptions) -> Pruned:
    """The target in `path` without what `options` leaves out, by what `prompts` show of it."""
    device = choose_device(options.device)
    with open_checkpoint(path) as checkpoint, torch.no_grad():
        whole = whole_shape(read_config(checkpoint.config))
        shape = smaller(options, whole)
        scores = list(look(checkpoint, whole, _texts(checkpoint, prompts, options.prompt_tokens), device))
        layers = largest(torch.tensor([one.turned for one in scores]), shape.num_layers).tolist()
        tensors = {"norm.weight": checkpoint.tensor("model.norm.weight").clone()}
        for place, number in enumerate(layers):
            for name, one in cut(read_layer(checkpoint, whole, number), scores[number], shape).items():
                tensors[f"layers.{place}.{name}"] = one
    return Pruned(shape, tensors, layers)


def write_pruned(options: TrainOptions, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Without distilling: the model in --out, and the report."""
    path = resolve(options.model)
    found = prune(path, prompts, options)
    tensors = {f"model.{name}": one for name, one in found.tensors.items()}
    with open_checkpoint(path) as checkpoint:
        for name in ("model.embed_tokens.weight", *(() if found.shape.tied else ("lm_head.weight",))):
            tensors[name] = checkpoint.tensor(name)
    written.write_model(options.out, found.shape.config(), tensors, path)
    return {"kind": options.kind, "target": options.model or "default", "head": str(options.out / written.MODEL),
            "layers": found.layers, "parameters": sum(one.numel() for one in tensors.values()), "steps": 0,
            "answer_tokens": 0, "tokens_learned_from": 0, "tokens_per_cycle": {}}


# ---------------------------------------------------------------- shapes


def whole_shape(target: ModelConfig) -> LlamaShape:
    """The target's own, where it is Llama's."""
    rope = target.rope
    llama = target.model_type in FAMILIES and not target.num_experts and target.latent is None \
        and (target.activation, target.attention_scale) == ("silu", target.head_dim ** -0.5) \
        and (rope.kind, rope.rotary_dim, target.local_rope) == ("default", target.head_dim, None) \
        and not (target.attention_bias or target.mlp_bias or target.score_cap or target.logit_cap) \
        and not any(target.windows) and all(target.kv_source(layer) == layer for layer in range(target.num_layers))
    if not llama:
        raise ConfigError(f"Only targets of Llama's shape are pruned (no biases, windows, experts or scaled "
                          f"positions), and this one ({target.model_type}) has another: use `paceline train draft`, or "
                          "train a head.")
    return LlamaShape(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_layers=target.num_layers,
        num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        intermediate_size=target.intermediate_size, norm_eps=target.norm_eps, rope_theta=rope.theta,
        positions=target.max_position_embeddings, tied=target.tie_word_embeddings)


def smaller(options: TrainOptions, whole: LlamaShape) -> LlamaShape:
    """What is left."""
    kept = {"layers": (options.layers, whole.num_layers), "heads": (options.heads, whole.num_heads),
            "width": (options.width, whole.intermediate_size)}
    for name, (wanted, there) in kept.items():
        if wanted is not None and wanted > there:
            raise ConfigError(f"--{name} is how many are kept, and this target has {there}, not {wanted}.")
    layers, heads, width = (there if wanted is None else wanted for wanted, there in kept.values())
    sharing = whole.num_heads // whole.num_kv_heads
    if heads % sharing:
        raise ConfigError(f"--heads must be a multiple of {sharing}, got {heads}: so many share a key head in this "
                          "target, and stay or go together.")
    return replace(whole, num_layers=layers, num_heads=heads, num_kv_heads=heads // sharing, intermediate_size=width)


# ---------------------------------------------------------------- what counts


def look(checkpoint: Checkpoint, shape: LlamaShape, texts: list[list[int]],
         device: torch.device) -> Iterator[Scores]:
    """What each layer does to the texts."""
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    rotate = Rotation(shape, max(map(len, texts)), device)
    streams, known = [], []
    for part in _parts(texts):
        longest = max(map(len, part))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in part])
        streams.append(embedding[ids].float().to(device))
        lengths = torch.tensor([len(text) for text in part], device=device)
        known.append(torch.arange(longest, device=device) < lengths[:, None])
    for number in range(shape.num_layers):
        layer = read_layer(checkpoint, shape, number).to(device)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        turned = []
        for place, (stream, there) in enumerate(zip(streams, known)):
            with _Watch(layer) as watch:
                streams[place] = layer(stream, torch.arange(stream.shape[1], device=device).expand(stream.shape[:2]),
                                       rotate)
            turned.append(1.0 - F.cosine_similarity(stream[there], streams[place][there], dim=-1))
            seen.append((_by_group(layer, watch.mixed[there]),
                         watch.inner[there].abs() * layer.mlp.down_proj.weight.norm(dim=0)))
        groups, features = (torch.cat(parts).mean(0).cpu() for parts in zip(*seen))
        yield Scores(float(torch.cat(turned).mean()), groups, features)


class _Watch:
    """What enters the last products of a layer's attention and feed-forward."""

    mixed: torch.Tensor
    inner: torch.Tensor

    def __init__(self, layer: Layer) -> None:
        self._hooks = [layer.self_attn.o_proj.register_forward_pre_hook(self._note("mixed")),
                       layer.mlp.down_proj.register_forward_pre_hook(self._note("inner"))]

    def _note(self, name: str) -> Any:
        return lambda module, given: setattr(self, name, given[0])

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _by_group(layer: Layer, mixed: torch.Tensor) -> torch.Tensor:
    """[N, heads * d] -> [N, key heads]: sizes of what each adds to the stream."""
    count = layer.self_attn.kv_heads
    ways = layer.self_attn.o_proj.weight.chunk(count, 1)
    return torch.stack([F.linear(part, way).norm(dim=-1) for part, way in zip(mixed.chunk(count, 1), ways)], 1)


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` largest, ascending; of equal ones the first stay."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


# ---------------------------------------------------------------- weights


def read_layer(checkpoint: Checkpoint, shape: LlamaShape, number: int) -> Layer:
    layer = Layer(shape)
    for name, one in layer.named_parameters():
        one.requires_grad_(False).copy_(checkpoint.tensor(f"model.layers.{number}.{name}"))
    return layer


def cut(layer: Layer, scores: Scores, shape: LlamaShape) -> dict[str, torch.Tensor]:
    """The layer's tensors, without the heads and features that count least."""
    sharing = shape.num_heads // shape.num_kv_heads
    groups, features = largest(scores.groups, shape.num_kv_heads), largest(scores.features, shape.intermediate_size)
    keys = _rows(groups, shape.head_dim)
    queries = _rows(groups, sharing * shape.head_dim)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": features, "up_proj": features}
    columns = {"o_proj": queries, "down_proj": features}
    found = {}
    for name, one in layer.named_parameters():
        matrix = name.split(".")[-2]
        left = one[rows[matrix]] if matrix in rows else one[:, columns[matrix]] if matrix in columns else one
        found[name] = left.detach().clone()
    return found


def _rows(places: torch.Tensor, size: int) -> torch.Tensor:
    """Those of blocks of `size`."""
    return (places[:, None] * size + torch.arange(size)).flatten()


# ---------------------------------------------------------------- texts


def _texts(checkpoint: Checkpoint, prompts: Sequence[Prompt], longest: int) -> list[list[int]]:
    """The first prompts, as plain texts, cut where they are too long."""
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is None:
        raise ConfigError("This model came without a tokenizer, so prompts cannot become its tokens: name another one "
                          "with --model.")
    found: list[list[int]] = []
    left = CALIBRATION
    for prompt in prompts:
        ids = tokenizer.encode(plain_text(prompt))[:min(longest, left)]
        if ids:
            found.append(ids)
        left -= len(ids)
        if not left:
            break
    if not found:
        raise ConfigError("The prompts hold no tokens to see the target at work: give others with --data.")
    return found


def _parts(texts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Texts of like length together."""
    part: list[list[int]] = []
    for text in sorted(texts, key=len):
        if part and (len(part) + 1) * len(text) > AT_ONCE:
            yield part
            part = []
        part.append(text)
    yield part
