"""What a model's files say of it, without its weights being read."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.hub.cache import folder_bytes
from paceline.hub.catalogue import smaller_relatives
from paceline.hub.names import hub_name, short_name
from paceline.hub.store import here, read_manifest
from paceline.models.heads.packaged import PACKAGED_HEADS, packaged_heads
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.gguf_checkpoint import GGUFCheckpoint
from paceline.models.load.opening import open_checkpoint
from paceline.models.registry import read_config
from paceline.models.tokenizer import Tokenizer


def read_facts(name: str, path: Path) -> dict[str, Any]:
    """For `paceline show`; None where the files do not say."""
    folder = path if path.is_dir() else path.parent
    manifest = read_manifest(folder) or {}
    with open_checkpoint(path) as checkpoint:
        config = read_config(checkpoint.config)
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        sizes = Counter[str]()
        for tensor in checkpoint.names():
            sizes[checkpoint.stored_type(tensor)] += math.prod(checkpoint.shape(tensor))
        wanted = hub_name(name)
        called = name.lower() if wanted is None else short_name(wanted)
        heads = [] if tokenizer is None else list(
            packaged_heads(PACKAGED_HEADS, config, tokenizer.fingerprint, called))
        relatives = smaller_relatives(called.partition(":")[0])
        return {
            "name": name, "path": str(path), "repository": manifest.get("repo"), "commit": manifest.get("commit"),
            "bytes": path.stat().st_size if path.is_file() else folder_bytes(path),
            "architecture": config.model_type, "parameters": sizes.total(), "layers": config.num_layers,
            "hidden_size": config.hidden_size, "vocabulary": config.vocab_size,
            "context": config.max_position_embeddings, "quantisation": _stored(checkpoint, sizes),
            "licence": _licence(checkpoint) or manifest.get("licence"),
            "drafters": ["ngram", "suffix", *heads,
                         *(f"draft with {one}" for one in relatives if here(one) is not None)],
            "drafters_to_pull": [one for one in relatives if here(one) is None],
        }


def _stored(checkpoint: Checkpoint, sizes: Counter[str]) -> str:
    """The types that hold a percent of it or more, largest first; and what the config calls that."""
    types = [f"{kind} ({100 * count / sizes.total():.0f} %)" for kind, count in sizes.most_common()
             if 100 * count >= sizes.total()]
    method = checkpoint.config.get("quantization_config")
    named = [str(method["quant_method"])] if isinstance(method, dict) and "quant_method" in method else []
    return ", ".join(named + types)


def _licence(checkpoint: Checkpoint) -> str | None:
    if not isinstance(checkpoint, GGUFCheckpoint):
        return None
    return checkpoint.file.metadata.text("general.license", "") or None
