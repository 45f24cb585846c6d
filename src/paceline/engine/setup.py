"""What an engine runs, as traces name it, and the options that run it again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import KERNELS, EngineOptions
from paceline.engine.parallel.leader import Leader
from paceline.kernels.cpu import load as native_library
from paceline.sampling.setup import Setup

if TYPE_CHECKING:
    from paceline.engine.core import Engine

_NAMES = {torch.float8_e4m3fn: "fp8"}


def setup_of(engine: Engine) -> Setup:
    model, tokenizer, device = engine.model, engine.tokenizer, engine.runner.device
    return Setup(
        model=engine.revision, tokenizer=None if tokenizer is None else tokenizer.fingerprint(),
        eos=" ".join(map(str, sorted(engine.eos_ids))), device=device.type,
        dtype=dtype_name(engine.dtype), kv_dtype=dtype_name(engine.storage.dtype),
        quantization=model.quantization, kernels=engine.kernels.name, native_forward=model.self_contained,
        deterministic=engine.kernels.deterministic, max_model_len=engine.config.max_model_len,
        built_for=model.built_for, tensor_parallel_size=model.size if isinstance(model, Leader) else 1,
        chat_template=_template_hash(engine), processor=_processor(device), torch=torch.__version__,
        version=_version())


def options_for(setup: Setup, *, model: str | None, adapters: Mapping[str, str] | None, rows: int) -> EngineOptions:
    """Options of an engine that is set up like that, for one request whose steps have up to so many rows. It drafts
    nothing of its own, so it has no heads; and it is one process, however many ranks there were: whoever replays says
    how many cards there are."""
    kernels = setup.kernels.removesuffix("-deterministic")
    if adapters is None and setup.quantization is not None and not setup.native_forward:
        adapters = {}  # there was room for some, which keeps the forward in torch
    sizes: dict[str, Any] = {"max_model_len": setup.max_model_len}
    if setup.max_model_len < setup.built_for:  # the cache was smaller than the context, which was left open
        size = math.gcd(setup.max_model_len, 16) or 1
        sizes = {"block_size": size, "kv_blocks": setup.max_model_len // size}
    return EngineOptions(
        model=model, device=setup.device, dtype=setup.dtype, kv_dtype=setup.kv_dtype, quantization=setup.quantization,
        kernels=kernels if kernels in KERNELS else "auto", deterministic=setup.deterministic,
        adapters=adapters, heads=(), max_num_seqs=1, max_batch_tokens=None if rows <= 512 else rows, **sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """As options name it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _template_hash(engine: Engine) -> str | None:
    chat = engine.chat
    if chat is None or chat.source is None:
        return None
    return hashlib.sha256(f"{chat.source}\0{chat.tool_source}".encode()).hexdigest()[:32]


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    native = native_library()
    return "cpu" if native is None else str(native.available_kernels()[0])


def _version() -> str:
    with suppress(PackageNotFoundError):  # run from its sources
        return version("paceline")
    return ""
