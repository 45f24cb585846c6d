"""From options to a running engine: find the files, choose device and dtype, build the model, size the cache."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline import config as configs
from paceline.cache.storage import bytes_per_token
from paceline.config import GIB, EngineConfig, EngineOptions, Facts
from paceline.engine.card import Card, check_card, check_weights, inspect_card, no_room
from paceline.engine.core import Engine
from paceline.engine.drafting.models import LoadedModel
from paceline.engine.execute.target_heads import head_planes
from paceline.engine.parallel.calls import Share
from paceline.engine.parallel.leader import Leader
from paceline.engine.parallel.processes import ProcessFollowers, check_threads
from paceline.engine.trained_heads import comes_along, head_folder, load_heads, packaged_for
from paceline.errors import ConfigError, ModelFormatError, RequestError
from paceline.kernels import select
from paceline.kernels.cpu import HOW_TO_BUILD, DraftKernels, NativeKernels
from paceline.kernels.cpu import load as native_library
from paceline.kernels.cpu import require as require_native
from paceline.kernels.interface import Kernels
from paceline.models.chat import ChatTemplate
from paceline.models.config import ModelConfig
from paceline.models.heads.interface import Head
from paceline.models.heads.packaged import PACKAGED_HEADS
from paceline.models.interface import CausalLM, activations
from paceline.models.load.adapters import read_adapter
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.resolve import resolve
from paceline.models.load.weights import Weights, check_vocabulary
from paceline.models.native import NativeDecoder, unsupported
from paceline.models.packing import BLOCKS, PackingWeights, bits_in_blocks
from paceline.models.registry import build, read_config
from paceline.models.shard import WHOLE, Shard, check_shares
from paceline.models.tokenizer import Tokenizer, named_ids
from paceline.speculation.spec import heads_named
from paceline.speculation.spec import parse as parse_speculation

log = logging.getLogger("paceline.engine")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_DTYPES = DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PROBES = tuple(f"model.layers.0.{name}.weight" for name in (
    "mlp.down_proj", "block_sparse_moe.experts.0.w2", "self_attn.o_proj"))
"""The first of these that a checkpoint has tells how it stores its matrices."""


def build_engine(options: EngineOptions, progress: Callable[[str, int, int | None], None] | None = None,
                 packaged: Path = PACKAGED_HEADS) -> Engine:
    """Everything is checked before the weights are read, so that a mistake costs seconds, not minutes. `packaged`: the
    folder of the trained heads that come with Paceline."""
    configs.check(options)
    wish = parse_speculation(options.speculation)
    named = {name: head_folder(name, packaged)
             for name in dict.fromkeys([*(options.heads or ()), *heads_named(wish)])}
    ranks = options.tensor_parallel_size
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    card = inspect_card(device) if device.type == "cuda" else None
    if card is not None:
        check_card(card, options.kernels, dtype, options.kv_dtype)
    adapters = {name: read_adapter(place) for name, place in (options.adapters or {}).items()}
    path = resolve(options.model, progress=progress)
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        if tokenizer is not None:
            check_vocabulary(checkpoint, tokenizer.vocab_size, tokenizer.added_at_end)
        model = load_model(options, checkpoint, device, dtype, card) if ranks == 1 else shared_model(
            options, checkpoint, path, device, dtype, card)
        revision = checkpoint.revision
        chat = ChatTemplate.of(checkpoint, tokenizer, options.chat_template)
        eos = tokenizer.eos_ids if tokenizer is not None else config_eos(checkpoint)
    heads = load_heads(named, model, tokenizer, options)
    if options.heads is None and not named and ranks == 1 and comes_along(device, wish):
        heads = packaged_for(model, tokenizer, options, packaged, device, cache_dtype(model, options, dtype),
                             head_kernels(model, kernels_for(model, options, device), options))
    engine = engine_for(model, tokenizer, options, device=device, dtype=dtype, revision=revision, eos_ids=eos,
                        chat=chat, source=ModelFiles(options, path, device, dtype), heads=heads)
    for name, adapter in adapters.items():
        engine.adapters.add(name, adapter)
    if options.capture == "start":
        engine.capture(progress)
    return engine


def load_model(options: EngineOptions, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
               card: Card | None, shard: Shard = WHOLE) -> CausalLM:
    """The engine's own model, or a rank's share of it. What does not fit a card is refused before it is read, or where
    it ends."""
    if card is None:
        return build_model(options, checkpoint, device, dtype, options.max_model_len, shard)
    parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()) // shard.size
    check_weights(card, parameters, dtype)
    try:
        return build_model(options, checkpoint, device, dtype, options.max_model_len, shard)
    except torch.OutOfMemoryError as problem:
        raise ConfigError(no_room(inspect_card(device), parameters, dtype)) from problem


def shared_model(options: EngineOptions, checkpoint: Checkpoint, path: Path, device: torch.device, dtype: torch.dtype,
                 card: Card | None) -> Leader:
    """Rank 0's share of a model that several hold, and the others, who load theirs meanwhile."""
    check_shares(read_config(checkpoint.config), options.tensor_parallel_size)
    check_threads(options.tensor_parallel_size, device)
    native = wants_native(options, checkpoint, device)
    exact = native or select(options.deterministic, device, options.kernels).deterministic
    if native:  # by the memory that is free now, which each rank would see another way
        options = replace(options, quantization="blocks" if keeps_blocks(options, checkpoint) else "int8")
    followers = ProcessFollowers(options, path, device, dtype, exact)
    try:
        model = load_model(options, checkpoint, device, dtype, card, Shard(followers.ranks, exact))
        followers.wait(checkpoint.revision)
    except BaseException:
        followers.close()
        raise
    return Leader(model, followers)


def follower_share(options: EngineOptions, path: Path, device: torch.device, dtype: torch.dtype,
                   shard: Shard) -> tuple[Share, str]:
    """What another rank loads, and the revision of the model that it found."""
    card = inspect_card(device) if device.type == "cuda" else None
    with open_checkpoint(path) as checkpoint:
        model = load_model(options, checkpoint, device, dtype, card, shard)
        return Share(model, kernels_for(model, options, device), device), checkpoint.revision


def build_model(options: EngineOptions, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
                length: int | None, shard: Shard = WHOLE) -> CausalLM:
    """The checkpoint's model for positions below `length` (None: its context), or a rank's share of it."""
    shape = read_config(checkpoint.config)
    weights = Weights(checkpoint, dtype, device, shard)
    length = length or shape.context
    if length > shape.max_position_embeddings:
        log.warning("max_model_len=%d is beyond the %d tokens this model was made for: expect worse text there",
                    length, shape.max_position_embeddings)
    shape = shape.below(length)
    model: CausalLM
    native = wants_native(options, checkpoint, device)
    if native and options.kv_dtype == "fp8":
        raise ConfigError("kv_dtype='fp8' is there on CUDA cards and in torch (kernels='eager'), and this "
                          "model runs on the native CPU path: use kv_dtype='int8', which takes as many bytes.")
    reason = why_not_whole(options, checkpoint, shape)
    if native and reason is None:
        model = NativeDecoder(shape, weights, length, threads=native_threads(options),
                              kv_dtype=choose_kv_dtype(options.kv_dtype, torch.int8),
                              keep_blocks=keeps_blocks(options, checkpoint))
    else:
        check_torch_cache(options, shape)
        if native:
            log.info("the native kernels run this model's linear and attention layers, torch the rest: %s", reason)
        packing = PackingWeights(weights, keeps_blocks(options, checkpoint), split_outliers=True) if native else weights
        model = build(shape, packing, length)
    if native and require_native().available_kernels()[0] == "portable":
        log.warning("this CPU has neither dotprod (Arm) nor AVX2 with FMA and F16C (x86-64): the native kernels "
                    "run in portable C++, several times slower")
    unused = weights.unused()
    if unused and shard.size == 1:  # others take some of the experts
        log.warning("%d tensors of %s are not used, among them %s", len(unused), checkpoint.path, unused[0])
    return model


def why_not_whole(options: EngineOptions, checkpoint: Checkpoint, shape: ModelConfig) -> str | None:
    """What keeps a forward from running whole in native code; None: nothing."""
    if options.adapters is not None:
        return "adapters need it"
    if options.tensor_parallel_size > 1:
        return "several ranks hold it"
    return "it keeps outlier columns in floats" if checkpoint.has_outliers else unsupported(shape)


class ModelFiles:
    """Further models for a running engine, opened with the options it was built with (engine.draft_models)."""

    def __init__(self, options: EngineOptions, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        """`path`: of the engine's own model."""
        self._options = options
        self._path = path
        self._device = device
        self._dtype = dtype
        self.threads = native_threads(options)

    def load(self, name: str, max_model_len: int) -> LoadedModel:
        options = replace(self._options, adapters=None, tensor_parallel_size=1, tensor_parallel_address=None)
        if options.kernels == "native":  # asked for the target; this one is run by what suits it
            options = replace(options, kernels="auto")
        with open_checkpoint(resolve(name)) as checkpoint:
            tokenizer = Tokenizer.from_checkpoint(checkpoint)
            if tokenizer is not None:
                check_vocabulary(checkpoint, tokenizer.vocab_size, tokenizer.added_at_end)
            shape = read_config(checkpoint.config)
            whole = wants_native(options, checkpoint, self._device) and \
                why_not_whole(options, checkpoint, shape) is None
            if (options.kv_dtype == "int8" and not whole) or (options.kv_dtype == "fp8" and shape.latent is not None):
                log.warning("the draft model %s keeps its cache in the format that kv_dtype='auto' stands for: "
                            "kv_dtype=%r is not there for it", name, options.kv_dtype)
                options = replace(options, kv_dtype="auto")  # a cache of its own, that torch can run
            length = min(max_model_len, shape.max_position_embeddings)
            model = build_model(options, checkpoint, self._device, self._dtype, length)
        return LoadedModel(model, tokenizer, kernels_for(model, options, self._device),
                           cache_dtype(model, options, self._dtype))

    @contextmanager
    def weights(self) -> Iterator[Weights]:
        if self._options.tensor_parallel_size > 1:
            raise RequestError("speculation method 'precision' is not there for a model that several ranks hold "
                               "(tensor_parallel_size): use another method.", "speculation")
        with open_checkpoint(self._path) as checkpoint:
            yield Weights(checkpoint, self._dtype, self._device)


def engine_for(model: CausalLM, tokenizer: Tokenizer | None, options: EngineOptions, *, device: torch.device,
               dtype: torch.dtype = torch.float32, revision: str = "", eos_ids: frozenset[int] = frozenset(),
               heads: Mapping[str, Head] | None = None, **more: Any) -> Engine:
    """An engine around a model that is already in memory, and trained `heads` of it by the names that requests use."""
    for head in (heads or {}).values():
        head.config.check_target(model.config, None if tokenizer is None else tokenizer.fingerprint())
    check_ends(eos_ids, model.config.vocab_size)
    if model.kv_dtype is None:
        check_torch_cache(options, model.config)
    kv_dtype = cache_dtype(model, options, dtype)
    extra = head_planes(heads, kv_dtype, activations(model, device)) if heads else ()
    # Ranks of this host, each of which needs as much of its memory.
    here = model.size if isinstance(model, Leader) and options.tensor_parallel_address is None else 1
    facts = Facts(device=device.type, context=model.config.context,
                  bytes_per_token=bytes_per_token(model.cache_groups, kv_dtype, extra),
                  free_memory=_free_memory(device) // (here if device.type == "cpu" else 1),
                  total_memory=_total_memory(device), cores=os.cpu_count() or 1,
                  host_memory=configs.available_memory() // here)
    config = configs.resolve(options, facts)
    for name, reason in config.why.items():
        log.debug("%s = %s", name, reason)
    kernels = kernels_for(model, options, device)
    if options.speculation is not None and options.deterministic is None and not kernels.deterministic:
        log.warning("plain torch on a CPU adds in an order that depends on the batch: speculation can change a text "
                    "where two tokens are all but equally likely. deterministic=True never does.")
    while True:
        try:
            return Engine(model, tokenizer, config, kernels, device=device, dtype=dtype, kv_dtype=kv_dtype,
                          revision=revision, eos_ids=eos_ids, speculation=options.speculation, heads=heads,
                          head_kernels=head_kernels(model, kernels, options), **more)
        except torch.OutOfMemoryError as problem:
            config = smaller_cache(config, options, facts.bytes_per_token, problem)


def smaller_cache(config: EngineConfig, options: EngineOptions, token_bytes: int, problem: Exception) -> EngineConfig:
    """Half the blocks where they were not asked for by number, or a refusal that says what was tried."""
    blocks, size = config.kv_blocks // 2, config.block_size
    taken = config.kv_blocks * size * token_bytes / GIB
    tried = f"{config.kv_blocks} cache blocks of {size} tokens take {taken:.2f} GiB"
    if options.kv_blocks is not None:
        raise ConfigError(f"{tried} and there is less memory than that: lower kv_blocks, or leave it out.") from problem
    if blocks * size < min(config.max_model_len, options.max_model_len or configs.LEAST_CONTEXT):
        raise ConfigError(f"{tried} and there is less memory than that: free some, lower max_model_len, or use a "
                          "smaller model.") from problem
    log.warning("%s and there is less memory than that: trying %d", tried, blocks)
    return replace(config, kv_blocks=blocks, max_model_len=min(config.max_model_len, blocks * size))


def kernels_for(model: CausalLM, options: EngineOptions, device: torch.device) -> Kernels:
    if model.self_contained:
        return NativeKernels()
    if options.kernels == "native" or model.bits < 16:
        return NativeKernels(native_threads(options))
    return select(options.deterministic, device, options.kernels)


def head_kernels(model: CausalLM, kernels: Kernels, options: EngineOptions) -> Kernels:
    """What a model's trained heads run with: they are written on kernels even where the model needs none."""
    return DraftKernels(native_threads(options)) if model.self_contained else kernels


def native_threads(options: EngineOptions) -> int:
    return options.threads or torch.get_num_threads()


def wants_native(options: EngineOptions, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Native code runs what the file itself stores in few bits; rounding a model that is stored in floats has to be
    asked for (kernels="native" or quantization)."""
    if options.kernels == "native":
        if device.type != "cpu":
            raise ConfigError("kernels='native' runs on the CPU only: use device='cpu' or kernels='auto'.")
        return True
    if options.quantization is not None:
        if options.kernels != "auto" or device.type != "cpu":
            raise ConfigError(f"quantization={options.quantization!r} is there on the native CPU path only: use "
                              "device='cpu' and kernels='auto', or leave it out.")
        return True
    if options.kernels != "auto" or device.type != "cpu" or options.dtype not in ("auto", "float32"):
        return False
    if options.kv_dtype == "bfloat16":
        return False
    if not checkpoint.rounded:
        probe = next((checkpoint.packed(name) for name in PROBES if checkpoint.has(name)), None)
        if probe is None or probe[0] not in BLOCKS:
            return False
    if native_library() is None:
        log.warning("running in torch: the native CPU kernels are not built (%s)", HOW_TO_BUILD)
        return False
    return True


def keeps_blocks(options: EngineOptions, checkpoint: Checkpoint) -> bool:
    """Whether native weights stay in the file's blocks. In 8 bits with a scale a row they multiply faster
    (docs/benchmarks.md), but those of a 4-bit file then take twice the memory."""
    if options.quantization is not None:
        return options.quantization == "blocks"
    needed = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    if needed <= configs.available_memory() // 2 or _block_bytes(checkpoint) >= needed:
        return False
    log.info("the weights stay in the file's blocks: %.1f GiB in 8 bits would be more than half of the free memory",
             needed / configs.GIB)
    return True


def _block_bytes(checkpoint: Checkpoint) -> float:
    """What the weights take in the native code where the file's blocks are kept."""
    return sum(math.prod(checkpoint.shape(name)) * bits_in_blocks(checkpoint.stored_type(name)) / 8
               for name in checkpoint.names())


def choose_device(wish: str) -> torch.device:
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wish)
    except (RuntimeError, TypeError) as problem:
        raise ConfigError(f"Unknown device {wish!r}: use 'auto', 'cpu' or 'cuda'.") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for but this machine has no CUDA device that torch can use: "
                          "use device='cpu' or 'auto'; `paceline doctor` shows what is there.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={wish!r} was asked for but there are {torch.cuda.device_count()} CUDA devices: use "
                          "'cuda:0' or 'auto'.")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"Device {wish!r} is not supported: use 'auto', 'cpu' or 'cuda'.")
    return device


def choose_dtype(wish: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where 16-bit matrix products are slow or wrong-sized; bfloat16 on a card."""
    if wish == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[wish]


def choose_kv_dtype(wish: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if wish == "auto" else KV_DTYPES[wish]


def cache_dtype(model: CausalLM, options: EngineOptions, dtype: torch.dtype) -> torch.dtype:
    """What a model's cache holds. A native one was built for one type: int8 unless asked otherwise, which costs a tenth
    of a percent of perplexity (docs/benchmarks.md) and halves the time of long contexts."""
    return choose_kv_dtype(options.kv_dtype, model.kv_dtype or dtype)


def check_torch_cache(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse a cache that only native code can read, and codes where a latent is key and value at once."""
    if config.latent is not None and options.kv_dtype in ("int8", "fp8"):
        raise ConfigError(f"kv_dtype={options.kv_dtype!r} is not there for the latent cache of {config.model_type} "
                          "(MLA), which is small already: use kv_dtype='auto', 'float16' or 'bfloat16'.")
    if options.kv_dtype == "int8":
        raise ConfigError(
            "kv_dtype='int8' is there on the native CPU path only, and this model runs in torch: use kernels='native' "
            "on a CPU where the native code runs the model, or kv_dtype='auto' or 'float16'.")


def check_ends(eos_ids: frozenset[int], vocab_size: int) -> None:
    """A text that only an impossible token ends would never end."""
    for token in sorted(eos_ids):
        if not 0 <= token < vocab_size:
            raise ModelFormatError(f"The model's eos_token_id {token} is out of range: its vocabulary has ids 0 to "
                                   f"{vocab_size - 1}. Its files do not belong together, download them again.")


def config_eos(checkpoint: Checkpoint) -> frozenset[int]:
    return frozenset(named_ids(checkpoint.config.get("eos_token_id")))


def _total_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return configs.available_memory()
