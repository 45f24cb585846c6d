"""The trained heads of an engine that is to be made: where they lie, those that were asked for, and those that come
with Paceline for its model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch

from paceline.cache.storage import KVStorage, bytes_per_token
from paceline.config import EngineOptions
from paceline.engine.execute.target_heads import TargetHeads, head_planes
from paceline.errors import ModelNotFoundError
from paceline.hub.default_model import DEFAULT_MODEL
from paceline.kernels.interface import Kernels
from paceline.models.heads.formats.read import load_head
from paceline.models.heads.interface import Head
from paceline.models.heads.packaged import PACKAGED_HEADS, packaged_head, packaged_heads
from paceline.models.heads.target import Target
from paceline.models.interface import CausalLM, activations
from paceline.models.load.resolve import resolve
from paceline.models.tokenizer import Tokenizer
from paceline.speculation.spec import HEADS, Speculation

log = logging.getLogger("paceline.engine")
TRIAL_TOKENS = 64
"""Of a cache in which a head is tried out."""


def head_folder(name: str, packaged: Path = PACKAGED_HEADS) -> Path:
    """Where a trained head lies: a folder, the name of one that comes with Paceline, or a hub id that was pulled."""
    with suppress(OSError, RuntimeError):
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        own = packaged_head(packaged, name)
        if own is not None:
            return own
    try:
        return resolve(name)
    except ModelNotFoundError as problem:
        raise ModelNotFoundError(f"There is no trained head {name!r}: give the folder that `paceline train` or "
                                 f"somebody else wrote, or a hub id like owner/name that was fetched with "
                                 "`paceline pull`.") from problem


def load_heads(folders: Mapping[str, Path], model: CausalLM, tokenizer: Tokenizer | None,
               options: EngineOptions) -> dict[str, Head]:
    """Refuses those that were trained for another target, and says what differs."""
    longest = options.max_model_len or model.config.context
    fingerprint = tokenizer.fingerprint() if tokenizer is not None and folders else None
    return {name: load_head(folder, cast(Target, model), longest, tokenizer=fingerprint)
            for name, folder in folders.items()}


def comes_along(device: torch.device, wish: Speculation | None) -> bool:
    """Whether packaged heads are loaded though nobody has named one. On a card only for their own methods: `auto` wins
    by them there, but where 32 sample at once, and plain decoding pays for what a loaded head stores of every step, 4 %
    with 8 at once (docs/benchmarks.md, Many requests at once)."""
    return device.type != "cuda" or (wish is not None and wish.method in HEADS)


def packaged_for(model: CausalLM, tokenizer: Tokenizer | None, options: EngineOptions, packaged: Path,
                 device: torch.device, kv_dtype: torch.dtype, kernels: Kernels) -> dict[str, Head]:
    """The trained heads that come with Paceline for this model, to be run with these kernels beside a cache of this
    type. Nobody has asked for them: one that cannot run here is left out."""
    found: dict[str, Head] = {}
    if tokenizer is None:  # nobody knows what its ids mean
        return found
    streams, longest = activations(model, device), options.max_model_len or model.config.context
    called = (options.model or DEFAULT_MODEL).lower()
    for name, folder in packaged_heads(packaged, model.config, tokenizer.fingerprint, called).items():
        try:
            head = load_heads({name: folder}, model, tokenizer, options)
            planes = head_planes(head, kv_dtype, streams)
            blocks = [1 + -(-TRIAL_TOKENS // options.block_size)] * len(model.cache_groups)
            storage = KVStorage(model.cache_groups, blocks, options.block_size, kv_dtype, device, planes)
            TargetHeads(head, storage, kernels).try_out(longest, streams)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            log.warning("the trained head %s, which comes with Paceline, is left out: %s", name, problem)
            continue
        log.info("the trained head %s comes with Paceline and takes %d bytes of the cache a token", name,
                 bytes_per_token((), kv_dtype, planes))
        found |= head
    return found
