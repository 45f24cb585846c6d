"""From options and a target to the network that learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.llm import LLM
from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge, Weights
from paceline.training.networks.build import build_network
from paceline.training.networks.draft import DraftModel, begin_like
from paceline.training.networks.parts import HeadModule
from paceline.training.options import TrainOptions
from paceline.training.prune import Pruned
from paceline.training.shape import draft_shape, going_on, head_config
from paceline.training.target import Target
from paceline.training.written import Begun


@dataclass(frozen=True)
class Factory:
    options: TrainOptions
    llm: LLM
    target: Target
    path: Path
    """Of the target's files."""
    compiles: bool
    pruned: Pruned | None = None
    further: HeadConfig | None = None
    """Of a head that is trained further."""

    def network(self, ids: np.ndarray, mask: int | None) -> HeadModule:
        """`ids`: tokens that it drafts; `mask`: the one that stands for those to come."""
        options, engine = self.options, self.llm.engine
        tokenizer = None if engine.tokenizer is None else engine.tokenizer.fingerprint()
        judge = Judge(self.target, torch.from_numpy(ids), Weights(*options.loss_weights), self.compiles, options.whole)
        torch.manual_seed(options.seed)
        if self.pruned is not None:
            return self.pruned.network(judge, options.depth)
        if options.kind == "draft":
            model = DraftModel(draft_shape(options, engine.model.config), judge, options.depth)
            begin_like(model, self.path, engine.model.config)
            return model
        config = head_config(options, engine.model.config, len(ids), mask, tokenizer, options.model or "default")
        return build_network(config if self.further is None else going_on(config, self.further), judge)

    def check(self, begun: Begun) -> None:
        """The head of --init must be of the shape that is trained, and have no more to it."""
        network = self.network(begun.ids, begun.mask)
        begun.check(network.config)
        network.take(begun.tensors)
