"""The network of each kind."""

from __future__ import annotations

from paceline.models.heads.config import HeadConfig
from paceline.training.loss import Judge
from paceline.training.networks.chain import Eagle3, Mtp
from paceline.training.networks.dspark import DSpark
from paceline.training.networks.slots import SlotHead
from paceline.training.networks.stacked import Stacked

NETWORKS: dict[str, type[DSpark] | type[Eagle3] | type[Mtp] | type[Stacked]] = {
    "dspark": DSpark, "eagle3": Eagle3, "mtp": Mtp, "medusa": Stacked, "hydra": Stacked}


def build_network(config: HeadConfig, judge: Judge) -> SlotHead:
    """With weights drawn from torch's own generator."""
    return NETWORKS[config.kind](config, judge)
