"""A head's network out of its checkpoint, for one target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from paceline.kernels.packed import PackedWeight
from paceline.models.heads.block import BlockHead
from paceline.models.heads.chain import Eagle1Head, Eagle3Head, MtpHead
from paceline.models.heads.config import HeadConfig
from paceline.models.heads.interface import Head
from paceline.models.heads.stacked import StackedHead
from paceline.models.heads.target import Target
from paceline.models.heads.target_layer import TargetLayerHead
from paceline.models.heads.tensors import MAPS, MARKOV_W2, check, check_nothing_left, expected, target_ids
from paceline.models.heads.weights import HeadWeights
from paceline.models.packing import PackingWeights
from paceline.models.weight_source import WeightSource

NETWORKS: dict[str, Callable[[HeadConfig, WeightSource, Target, torch.Tensor | None, int], Head]] = {
    "dflash": BlockHead,
    "dspark": BlockHead,
    "eagle1": Eagle1Head,
    "eagle3": Eagle3Head,
    "hydra": StackedHead,
    "medusa": StackedHead,
    "mtp": MtpHead,
}


def build_head(config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: Target, max_model_len: int, *,
               tokenizer: str | None = None, packed: bool | None = None, where: str = "this checkpoint") -> Head:
    """The head for `target`, ready to draft behind texts of up to max_model_len tokens. packed: its matrices in 8 bits
    for the native kernels; None: where the target's own are. `tokenizer`: fingerprint of the target's, to be compared
    where the head knows one. A ModelFormatError says what does not fit together."""
    config.check_target(target.config, tokenizer)
    check(config, tensors, where)
    probe = target.embed(torch.zeros(1, dtype=torch.int64, device=target.head.weight.device))
    packed = isinstance(target.head.weight, PackedWeight) if packed is None else packed
    if config.whole_vocabulary and config.reduced and not packed and probe.device.type == "cpu":
        config, tensors = widened(config, tensors, where)
    weights: WeightSource = HeadWeights(tensors, probe.dtype, probe.device)
    if packed:
        weights = PackingWeights(weights)
    ids = target_ids(config, tensors["d2t"], where) if config.reduced else None
    if not config.target_layer:
        return NETWORKS[config.kind](config, weights, target, ids, max_model_len)
    head = TargetLayerHead(config, weights, target, ids, max_model_len)
    check_nothing_left(tensors, {*expected(config), *head.taken}, where)
    return head


def widened(config: HeadConfig, tensors: Mapping[str, torch.Tensor],
            where: str) -> tuple[HeadConfig, Mapping[str, torch.Tensor]]:
    """A head with whole_vocabulary that drafts from all of it, where floats are computed on a CPU and steps take long.
    (On a card the further columns of every draft cost more than they win, in crowds.) Of tokens outside the draft
    vocabulary the Markov head says nothing."""
    known = target_ids(config, tensors["d2t"], where)
    found = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    for name in found.keys() & {MARKOV_W2}:
        found[name] = found[name].new_zeros((config.vocab_size, config.markov_rank)).index_copy_(0, known, found[name])
    return replace(config, draft_vocab_size=config.vocab_size), found
