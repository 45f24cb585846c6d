"""By which keys a config.json is known to be a head's, and no model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SPECULATORS = "speculators_model_type"
BLOCKS = ("dflash_config", "target_layer_ids")
MEDUSA, HYDRA = "medusa_num_heads", "hydra_num_heads"


def is_eagle3_config(raw: Mapping[str, Any]) -> bool:
    named = raw.get("architectures")
    return isinstance(named, list) and any(isinstance(one, str) and "Eagle3" in one for one in named)


def describes_head(raw: Mapping[str, Any]) -> bool:
    """False: it is a model's, or only weights tell (EAGLE's first format, an MTP layer inside a model)."""
    return any(key in raw for key in (SPECULATORS, *BLOCKS, MEDUSA, HYDRA)) or is_eagle3_config(raw)
