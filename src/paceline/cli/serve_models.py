"""The models of `paceline serve`: one, or several, each with options of its own where a file has a table for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli import options
from paceline.cli.naming import named_twice
from paceline.config import GIB, available_memory
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.serve.pool import ModelPool
    from paceline.serve.several import ModelSpec

SAME = ("device", "dtype", "kv_dtype", "quantization", "deterministic", "kernels", "max_queue", "max_model_len",
        "max_num_seqs", "max_batch_tokens", "max_step_ms", "kv_blocks", "kv_cache_memory", "target_ttft_ms",
        "target_tpot_ms", "gpu_memory_utilization", "tensor_parallel_size", "preemption", "swap_space", "host_cache",
        "capture", "watch_share", "watch_action")
"""Options that the engine has by the same name."""
ONE_MODELS = ("model_name", "draft", "chat_template", "lora", "head")
"""Options that can only be meant for one model."""
MODEL_PARAMETERS = (*SAME, *ONE_MODELS, "speculation", "prefix_caching", "threads", "tool_parser")
"""What a model's table may say, by the names of the command's parameters."""
TABLES = "models"
"""Where the tables of a file are kept while options are read (context.meta)."""
LEAST_CACHE = 1 << 20


def wanted(context: typer.Context, argument: str | None, named: Sequence[str] | None) -> list[dict[str, Any]]:
    """A table for each model, whichever way it is named; the command line's come before a file's."""
    tables: list[dict[str, Any]] = context.meta.get(TABLES, [])
    source = context.get_parameter_source("named")
    if argument is not None and named and source is not None and source.name == "COMMANDLINE":
        raise ConfigError(f"{named_twice(argument, named[0])} Several models are served with a --model for each.")
    if tables and (argument is not None or named):
        raise ConfigError(f"The file has tables [[models]], and the model {argument or (named or ())[0]!r} is named "
                          "beside them: leave it out, or give it a table too.")
    names: list[str | None] = [argument] if argument is not None or not named else [*named]
    return tables or [{"model": name} for name in names]


def wish(speculation: str | None, draft: str | None) -> Any:
    """What is drafted with: --draft is short for the drafter of that name."""
    if draft is None:
        return options.speculation(speculation)
    if speculation != "auto":
        raise ConfigError("--draft and --speculation both say how to draft: leave one out, or name the model in "
                          '--speculation \'{"method": "draft", "model": ...}\'.')
    return {"method": "draft", "model": draft}


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the command's options are for AsyncLLM."""
    template = given["chat_template"]
    return {**{name: given[name] for name in SAME}, "model": given.get("model"),
            "enable_prefix_caching": given["prefix_caching"], "speculation": wish(given["speculation"], given["draft"]),
            "adapters": options.adapters(given["lora"]), "heads": options.heads(given["head"]),
            "chat_template": None if template is None else str(template)}


def check_several(given: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """Refuse what several models cannot have. `given`: the command's options, for all; `beside`: further ones that are
    set."""
    for name in ONE_MODELS:
        if given[name]:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to one model, and several are served: say it in "
                              "that model's table [[models]] of a --config FILE.")
    for name, value in beside.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a server with one model: leave it out, or start a "
                              "server for each model.")


def leave(pool: ModelPool[Any]) -> None:
    """The server has ended. A model that is still being loaded would hold the process up, or break on the way out."""
    if pool.busy:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def default_limit(device: str, share: float) -> int:
    """Bytes that models may take together where nobody has said: most of what is free now, or that share of a card."""
    from paceline.engine.build import choose_device
    from paceline.engine.card import inspect_card

    chosen = choose_device(device)
    return int(inspect_card(chosen).total * share) if chosen.type == "cuda" else available_memory() * 8 // 10


def cache_shares(limit: int, weights: Sequence[int]) -> list[int]:
    """Bytes for the cache of each: an equal share of what all weights leave, so that all fit beside each other. Where
    that would be little they take turns, and caches have a quarter of the limit, shared out."""
    each = max((limit - sum(weights)) // len(weights), limit // (4 * len(weights)))
    return [min(each, limit - own) for own in weights]


def weight_bytes(path: Path) -> int:
    """Of the files that the engine opens."""
    if path.is_file():
        return path.stat().st_size
    files = list(path.glob("*.safetensors")) or [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def specs(tables: Sequence[Mapping[str, Any]], given: Mapping[str, Any], limit: int) -> list[ModelSpec]:
    """`given`: what a table leaves open. A model that is not on this machine is an error now, not at its first
    request."""
    from paceline import AsyncLLM
    from paceline.models.load.resolve import resolve
    from paceline.serve.several import ModelSpec

    found = [{**given, **table} for table in tables]
    weights = [sum(weight_bytes(resolve(name)) for name in dict.fromkeys((own["model"], own["draft"]))
                   if name is not None) for own in found]
    made = []
    for own, taken, cache in zip(found, weights, cache_shares(limit, weights), strict=True):
        name = own["model_name"] or own["model"]
        if cache < LEAST_CACHE:
            raise ConfigError(f"The model {name!r} takes {taken / GIB:.2f} GiB, and models may take {limit / GIB:.2f} "
                              "GiB: raise --models-memory, or leave the model out.")
        engine = engine_options(own) | {"threads": own["threads"]}
        if own["kv_blocks"] is None and own["kv_cache_memory"] is None:
            engine["kv_cache_memory"] = cache / GIB
        elif own["kv_cache_memory"] is not None:
            cache = int(own["kv_cache_memory"] * GIB)
        made.append(ModelSpec(name, partial(AsyncLLM, warm_up=True, **engine), taken, cache,
                              tuple(engine["adapters"] or ()), {"tool_parser": own["tool_parser"]}))
    return made


def preloaded(tables: Sequence[Mapping[str, Any]], made: Sequence[ModelSpec], limit: int,
              progress: Any) -> dict[str, Any]:
    """Those that are loaded before the first request: the first model, unless its table says otherwise, and those
    whose tables say so. What cannot be loaded then is an error."""
    from paceline.serve.several import names_of

    names_of(made)
    chosen = [spec for place, (table, spec) in enumerate(zip(tables, made, strict=True))
              if table.get("preload", place == 0)]
    if len(chosen) > 1 and (needed := sum(spec.weights + spec.cache for spec in chosen)) > limit:
        raise ConfigError(f"The models to preload take {needed / GIB:.2f} GiB together, and models may take "
                          f"{limit / GIB:.2f} GiB: raise --models-memory, or preload fewer.")
    loaded: dict[str, Any] = {}
    with ExitStack() as undo:
        for spec in chosen:
            loaded[spec.name] = spec.load(progress=progress)  # type: ignore[call-arg]
            undo.callback(loaded[spec.name].close)
        undo.pop_all()
    return loaded
