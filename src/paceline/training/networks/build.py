"""The network of each kind."""

from __future__ import annotations

from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge
from paceline.training.networks.dspark import DSpark
from paceline.training.networks.parts import HeadModule


def build_network(config: HeadConfig, judge: Judge) -> HeadModule:
    """With weights drawn from torch's own generator."""
    return {"dspark": DSpark}[config.kind](config, judge)
