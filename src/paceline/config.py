"""Engine options: frozen, raw as the caller gave them; `resolve` turns them into sizes and says why."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.errors import ConfigError, NotYetError

GIB = 1 << 30
LEAST_CONTEXT = 256
"""Tokens that a cache has to hold to be of use, where nobody said how many."""
KERNELS = ("auto", "native", "eager", "reference", "triton", "stepped")
CAPTURES = ("lazy", "start", "never")
PREEMPTIONS = ("auto", "recompute", "swap")
WATCH_ACTIONS = ("off", "report")
SWAP_SPACE = {"cuda": 4 * GIB, "cpu": GIB}
"""Bytes to swap to by default, at most; and never more than an eighth of what is free, or than the cache itself."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a caller may set. None and "auto" mean: resolve for me."""

    model: str | None = None
    """A folder (safetensors and config.json), a .gguf file, a short name or a hub id, either with ":QUANT"; None: the
    default model."""
    chat_template: str | None = None
    """A file with the chat template (Jinja) to use instead of the model's own."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": a card where there is one."""
    dtype: str = "auto"
    """Of weights and activations where torch computes: "float32", "float16", "bfloat16", or "auto"."""
    quantization: str | None = None
    """Of the weights on the native CPU path: "int8", a scale per row, or "blocks", as a GGUF file stores them."""
    kv_dtype: str = "auto"
    """Of the cache: "float32", "float16", "bfloat16", "int8" (native path), "fp8" or "auto" (docs/serving.md)."""
    speculation: Any = None
    """For requests that do not say: a method's name, a dict with a "method", or None to decode plainly."""
    deterministic: bool | None = None
    """Logits of a row are the same bits alone, in any batch and chunking, so that speculation changes no text. None:
    wherever there are kernels for it, which is everywhere but in plain torch on a CPU; False: as fast as can be."""
    max_model_len: int | None = None
    """Longest prompt and output together, in tokens."""
    block_size: int = 16
    """Tokens per cache block."""
    kv_blocks: int | None = None
    """Cache blocks in all; None: what the sequences can use, within the free memory."""
    kv_cache_memory: float | None = None
    """GiB that the cache may take, at most; None: resolve for me. `kv_blocks` says it in blocks."""
    max_batch_tokens: int | None = None
    """Rows of a step at most."""
    max_num_seqs: int | None = None
    """Sequences that run at once at most."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike share cache blocks."""
    kernels: str = "auto"
    """auto: native where it can run the model as the file stores it, else eager (reference if deterministic=True).
    stepped: the device path in plain torch on the CPU, with the reference's bits: to test and to debug."""
    threads: int | None = None
    """Threads of the native kernels; None: as many as torch uses."""
    max_prefill_chunk: int | None = None
    """Rows of one prompt in a step at most; None: as many as the step has room for."""
    max_step_ms: float | None = None
    """Milliseconds that a step should take at most while somebody decodes: prompts are then computed in chunks sized by
    measured time, and of very many sequences not all get a token in every step. None: as long as it takes, which gives
    the most tokens a second where nobody waits for single ones. AsyncLLM and the server: 100."""
    target_ttft_ms: float | None = None
    """Milliseconds after which a request's first token should be there, unless it says otherwise: while one waits that
    would be late, nobody's drafts get rows. None: no target."""
    target_tpot_ms: float | None = None
    """Milliseconds that each further token should take: drafts of requests that are slower come first. None: no
    target."""
    max_queue: int = 4096
    """Samples that may wait; further requests are refused."""
    watermark: float = 0.01
    """Share of the cache blocks that admitting a request must leave free."""
    schedule_ahead: bool = False
    """Plan a step while the one before it is still undecided. For the CPU: a card whose steps are captured always
    does."""
    adapters: Mapping[str, str] | None = None
    """PEFT adapters by the names requests use, each a folder or a hub id. Where native code would run the whole model,
    torch runs it on native kernels instead, so that {} makes room for adapters that are loaded later."""
    heads: Sequence[str] | None = None
    """Trained heads that requests may draft with, each a folder, a hub id or the name of one that comes with Paceline;
    that of `speculation` need not be named again. None: where none is named, those that come with Paceline for this
    model; on a card only where `speculation` is one of their methods. Every step stores what they keep of
    its tokens, so they are there from the start or not at all."""
    preemption: str = "auto"
    """What becomes of a sequence that loses its blocks: "recompute", "swap" to host memory (where it has room), or
    "auto", whichever was measured to be cheaper."""
    swap_space: float | None = None
    """GiB of host memory for swapped sequences, at most; None: resolve for me."""
    host_cache: float = 0.0
    """GiB of host memory, at most, for blocks that the prefix cache has no room for; they come back on a hit."""
    gpu_memory_utilization: float = 0.9
    """Share of a card's memory that may be in use once the cache is there: weights, cache and whatever others have
    taken already. The rest is for what steps compute with, and for those who come later."""
    capture: str = "lazy"
    """Steps are captured on a card: "lazy" when first needed, "start" before the first request (decoding, prompts and
    mixes of every size; with drafts and rarer controls when first needed), "never": they are launched kernel by kernel,
    which is slower and takes no memory."""
    watch_share: float = 0.0
    """Share of the requests that speculate which are run once more without, when there is room, and compared
    (docs/drift.md); 0: none. The server: 0.01."""
    watch_action: str = "off"
    """What an alarm of that watch does: "off" switches the drafter's method off, "report" only tells of it."""
    tensor_parallel_size: int = 1
    """Processes (ranks) that hold the model together, each with a share of every layer and of the cache: a card each,
    or on a CPU its own threads (docs/cluster.md#tensor-parallel)."""
    tensor_parallel_address: str | None = None
    """HOST:PORT at which ranks from other hosts are waited for; None: all are started on this one."""

    @classmethod
    def of(cls, **raw: Any) -> EngineOptions:
        """Like the constructor, but an unknown key is a ConfigError that names the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in raw:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known options: {', '.join(known)}."
                raise ConfigError(f"Unknown option {key!r}.{hint}")
        return cls(**raw)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What resolution depends on besides the options; gathered by the engine, given by tests."""

    device: str
    """"cpu" or "cuda", already decided."""
    context: int
    """Longest context the model was made for."""
    bytes_per_token: int
    """Cache bytes one token takes over all cache groups."""
    free_memory: int
    """Bytes the cache could take on the device."""
    cores: int
    total_memory: int = 0
    """Bytes the device has, 0: as many as are free."""
    host_memory: int = 0
    """Bytes of host memory that are free."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything decided. `why` has one sentence for each value that was not given as it stands."""

    max_model_len: int
    block_size: int
    kv_blocks: int
    max_batch_tokens: int
    max_num_seqs: int
    enable_prefix_caching: bool
    max_prefill_chunk: int | None
    max_step_ms: float | None
    max_queue: int
    watermark: float
    schedule_ahead: bool = False
    captures: bool = True
    """Steps are captured where they can be."""
    preemption: str = "recompute"
    swap_blocks: int = 0
    """Host blocks for swapped sequences, in every cache group."""
    cold_blocks: int = 0
    """Host blocks for what the prefix cache has no room for, in every cache group."""
    watch_share: float = 0.0
    watch_action: str = "off"
    target_ttft_ms: float | None = None
    target_tpot_ms: float | None = None
    why: dict[str, str] = field(default_factory=dict)

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


def available_memory() -> int:
    """Bytes of host memory a new allocation could use now."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 * GIB


def check(options: EngineOptions) -> None:
    """Refuse what can never work, before a model is read."""
    if options.kernels not in KERNELS:
        raise ConfigError(f"kernels must be one of {', '.join(KERNELS)}, got {options.kernels!r}.")
    if options.capture not in CAPTURES:
        raise ConfigError(f"capture must be one of {', '.join(CAPTURES)}, got {options.capture!r}.")
    if options.kernels == "eager" and options.deterministic:
        raise ConfigError("kernels='eager' is not deterministic: use 'auto', 'native' or 'reference'.")
    for name in ("max_model_len", "kv_blocks", "max_batch_tokens", "max_num_seqs", "max_prefill_chunk", "max_queue",
                 "threads"):
        value = getattr(options, name)
        if value is None and name != "max_queue":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
    size = options.block_size
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 4096:
        raise ConfigError(f"block_size must be a whole number from 1 to 4096, got {size!r}.")
    longest = options.max_step_ms
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0):
        raise ConfigError(f"max_step_ms is a time in milliseconds above 0, or None for no limit, got {longest!r}.")
    for name in ("target_ttft_ms", "target_tpot_ms"):
        target = getattr(options, name)
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise ConfigError(f"{name} is a time in milliseconds above 0, or None for no target, got {target!r}.")
    watermark = options.watermark
    if isinstance(watermark, bool) or not isinstance(watermark, int | float) or not 0.0 <= watermark < 1.0:
        raise ConfigError(f"watermark is a fraction of the blocks, from 0 to below 1, got {options.watermark!r}.")
    share = options.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
        raise ConfigError("gpu_memory_utilization is a share of the card's memory, above 0 and up to 1, got "
                          f"{share!r}.")
    share = options.watch_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
        raise ConfigError(f"watch_share is a share of the requests, from 0 to 1, got {share!r}.")
    if options.watch_action not in WATCH_ACTIONS:
        raise ConfigError(f"watch_action must be one of {', '.join(WATCH_ACTIONS)}, got {options.watch_action!r}.")
    most = options.kv_cache_memory
    if most is not None and (isinstance(most, bool) or not isinstance(most, int | float) or not 0.0 < most < 1 << 20):
        raise ConfigError(f"kv_cache_memory is a number of GiB, above 0, got {most!r}.")
    if most is not None and options.kv_blocks is not None:
        raise ConfigError("kv_cache_memory and kv_blocks both say how large the cache is: leave one out.")
    check_host(options)
    check_ranks(options)
    if options.quantization not in (None, "int8", "blocks"):
        raise NotYetError(f"quantization={options.quantization!r} is not in this version yet; use 'int8' (a scale a "
                          "row), 'blocks' (as a GGUF file stores them), or leave it out.")
    if options.kv_dtype not in ("auto", "float32", "float16", "bfloat16", "int8", "fp8"):
        raise NotYetError(f"kv_dtype={options.kv_dtype!r} is not in this version yet; "
                          "use 'auto', 'float32', 'float16', 'bfloat16', 'int8' or 'fp8'.")
    named = options.adapters or {}
    if not isinstance(named, Mapping) or not all(
            isinstance(text, str) and text for pair in named.items() for text in pair):
        raise ConfigError(f"adapters must map names to folders, got {options.adapters!r}.")
    heads = () if options.heads is None else options.heads
    if isinstance(heads, str) or not isinstance(heads, Sequence) or not all(
            isinstance(place, str) and place for place in heads):
        raise ConfigError(f"heads must be a list of folders, got {options.heads!r}.")
    if options.dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise ConfigError(f"dtype must be 'auto', 'float32', 'float16' or 'bfloat16', got {options.dtype!r}.")


def check_ranks(options: EngineOptions) -> None:
    """Refuse what a model that several ranks hold cannot do."""
    size = options.tensor_parallel_size
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1024:
        raise ConfigError(f"tensor_parallel_size must be a whole number from 1 to 1024, got {size!r}.")
    if size == 1 and options.tensor_parallel_address is not None:
        raise ConfigError("tensor_parallel_address is of no use with tensor_parallel_size=1: raise that, or leave this "
                          "out.")


def check_host(options: EngineOptions) -> None:
    """Refuse what can never work of the options about host memory."""
    if options.preemption not in PREEMPTIONS:
        raise ConfigError(f"preemption must be one of {', '.join(PREEMPTIONS)}, got {options.preemption!r}.")
    for name in ("swap_space", "host_cache"):
        value = getattr(options, name)
        if name == "swap_space" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1 << 20:
            raise ConfigError(f"{name} is a number of GiB, 0 or more, got {value!r}.")
    if options.preemption == "swap" and options.swap_space == 0:
        raise ConfigError("preemption='swap' needs memory to swap to: raise swap_space, or use 'recompute'.")
    if options.preemption == "recompute" and options.swap_space:
        raise ConfigError("swap_space is of no use with preemption='recompute': use 'auto' or 'swap', or leave it out.")
    if options.host_cache and not options.enable_prefix_caching:
        raise ConfigError("host_cache keeps what the prefix cache has no room for, and enable_prefix_caching=False: "
                          "leave one of them out.")


def host_blocks(options: EngineOptions, facts: Facts, kv_blocks: int, why: dict[str, str]) -> tuple[int, int]:
    """Blocks to swap to, and blocks for what the prefix cache has no room for."""
    block = max(facts.bytes_per_token * options.block_size, 1)
    cold = int(options.host_cache * GIB) // block
    if options.host_cache and not cold:
        raise ConfigError(f"host_cache={options.host_cache} GiB does not hold one block of {block} bytes: raise it.")
    if options.preemption == "recompute":
        return 0, cold
    if options.swap_space is None:
        swap = min(SWAP_SPACE[facts.device], facts.host_memory // 8) // block
        why["swap_space"] = (f"{min(swap, kv_blocks) * block / GIB:.2f} GiB: what the cache holds, within an eighth of "
                             f"free host memory and {SWAP_SPACE[facts.device] / GIB:.0f} GiB")
        return min(swap, kv_blocks), cold
    swap = int(options.swap_space * GIB) // block
    if options.swap_space and not swap:
        raise ConfigError(f"swap_space={options.swap_space} GiB does not hold one block of {block} bytes: raise it.")
    return swap, cold


def cache_budget(options: EngineOptions, facts: Facts, seated: int) -> int:
    """Bytes the cache may take. `seated`: tokens of all texts that a card keeps for those who run."""
    given = None if options.kv_cache_memory is None else int(options.kv_cache_memory * GIB)
    if facts.device == "cpu":
        return min(facts.free_memory * 3 // 10, 4 * GIB) if given is None else given
    total = facts.total_memory or facts.free_memory
    free = max(0, facts.free_memory - int((1.0 - options.gpu_memory_utilization) * total) - 4 * seated)
    return free if given is None else min(given, free)


def resolve(options: EngineOptions, facts: Facts) -> EngineConfig:
    """Options + facts -> config. Pure: the same input gives the same config, whatever the machine."""
    check(options)
    why: dict[str, str] = {}
    size = options.block_size
    longest = options.max_model_len
    if longest is None:
        longest = facts.context
        why["max_model_len"] = f"{longest}: the context the model was made for"

    wanted = options.max_num_seqs
    if wanted is None:
        wanted = 256 if facts.device == "cuda" else 64
        why["max_num_seqs"] = f"{wanted}: the default on {facts.device}"

    blocks = options.kv_blocks
    if blocks is None:
        budget = cache_budget(options, facts, longest * wanted)
        per_block = facts.bytes_per_token * size
        most = -(-longest // size) * wanted
        blocks = max(1, min(budget // max(per_block, 1), most))
        if blocks * size < min(longest, LEAST_CONTEXT):
            if options.kv_cache_memory is not None:
                raise ConfigError(f"kv_cache_memory={options.kv_cache_memory:.3g} GiB is a cache of {blocks * size} "
                                  f"tokens ({facts.bytes_per_token} bytes each): raise it.")
            more = ", raise gpu_memory_utilization" if facts.device == "cuda" else ""
            raise ConfigError(
                f"{facts.free_memory / GIB:.2f} GiB of {facts.device} memory are free beside the weights, which is a "
                f"cache of {blocks * size} tokens ({facts.bytes_per_token} bytes each): free memory{more}, choose a "
                "smaller model, or keep the cache in fewer bits (kv_dtype).")
        why["kv_blocks"] = (f"{blocks} blocks of {size} tokens, {blocks * per_block / GIB:.2f} GiB: what {wanted} "
                            f"sequences can use at most, within {budget / GIB:.1f} GiB of {facts.device} memory")
    if blocks * size < longest:
        if options.max_model_len is not None:
            raise ConfigError(
                f"max_model_len={longest} needs {-(-longest // size)} cache blocks of {size} tokens but there are "
                f"{blocks}: raise kv_blocks, free memory, or lower max_model_len to {blocks * size}.")
        longest = blocks * size
        why["max_model_len"] = f"{longest}: what {blocks} cache blocks of {size} tokens hold for one sequence"

    rows = options.max_batch_tokens
    if rows is None:
        rows = 8192 if facts.device == "cuda" else 512
        why["max_batch_tokens"] = f"{rows}: rows of one step; max_step_ms keeps it short while somebody decodes"

    swap, cold = host_blocks(options, facts, blocks, why)
    return EngineConfig(
        max_model_len=longest, block_size=size, kv_blocks=blocks, max_batch_tokens=rows, max_num_seqs=wanted,
        enable_prefix_caching=options.enable_prefix_caching,
        max_prefill_chunk=options.max_prefill_chunk, max_step_ms=options.max_step_ms,
        max_queue=options.max_queue, watermark=options.watermark,
        schedule_ahead=options.schedule_ahead, captures=options.capture != "never",
        preemption=options.preemption, swap_blocks=swap, cold_blocks=cold, watch_share=options.watch_share,
        watch_action=options.watch_action, target_ttft_ms=options.target_ttft_ms,
        target_tpot_ms=options.target_tpot_ms, why=why)
