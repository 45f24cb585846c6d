"""`paceline pull`, `list`, `rm` and `show`: models by name, on this machine and on the hub."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.terminal import console, loading_bars

_NAME = typer.Argument(help="Short name, hub id (owner/name) or either with :QUANT, such as qwen3-0.6b:Q8_0.")


def pull(
    names: Annotated[list[str], _NAME],
) -> None:
    """Fetch models from the hub, or what is new of them. A download that broke off goes on where it was."""
    from paceline.hub.default_model import PACKAGED_MODELS
    from paceline.hub.names import hub_name
    from paceline.hub.pull import label
    from paceline.hub.pull import pull as fetch

    for name in names:
        with loading_bars() as progress:
            path = fetch(name, progress=progress)
        found = hub_name(name)
        called = name.lower() if found is None or name.lower() in PACKAGED_MODELS else label(found, path)
        console().print(f"{called} is at {path}", markup=False)


def list_models(
    every: Annotated[bool, typer.Option("--all", help="Those of the catalogue that are not here, too.")] = False,
    as_json: options.Json = False,
) -> None:
    """Say which models are on this machine, how large they are and which is the default."""
    from paceline.hub.cache import cache_dir
    from paceline.hub.catalogue import CATALOGUE
    from paceline.hub.store import local_models

    models: list[dict[str, Any]] = [
        {"name": model.name, "bytes": model.bytes, "path": str(model.path), "ready": model.ready,
         "default": model.name == options.DEFAULT_MODEL, "here": True, "own": model.own} for model in local_models()]
    names = {model["name"] for model in models}
    if options.DEFAULT_MODEL not in names:
        models.insert(0, _absent(options.DEFAULT_MODEL, 93_000_000))
    if every:
        models += [_absent(entry.name, entry.bytes) for entry in CATALOGUE.values() if entry.name not in names]
    if as_json:
        print(json.dumps({"folder": str(cache_dir()), "models": models}, indent=2))
        return
    _show_table(models)
    hint = "" if every else "; `paceline list --all` names more"
    console().print(f"in {cache_dir()}; `paceline pull NAME` fetches{hint}", style="dim", markup=False)


def _absent(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "bytes": size, "path": None, "ready": False, "default": name == options.DEFAULT_MODEL,
            "here": False, "own": True}


def _show_table(models: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    for model in models:
        words = ["the default"] if model["default"] else []
        if not model["here"]:
            words.append("fetched on first use" if model["default"] else "not here")
        elif not model["ready"]:
            words.append("incomplete: pull it again to go on" if model["own"] else "incomplete")
        if not model["own"]:
            words.append("in the cache of the hub's own client")
        table.add_row(model["name"], size(model["bytes"]), ", ".join(words))
    console().print(table, markup=False)


def size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def rm(
    names: Annotated[list[str], typer.Argument(help="As `paceline list` calls them.")],
) -> None:
    """Remove models that were fetched, or what is here of them."""
    from paceline.hub.store import remove

    for name in names:
        called, freed = remove(name)
        console().print(f"{called} is gone; {size(freed)} are free again", markup=False)


def show(
    model: options.ModelArgument = None,
    as_json: options.Json = False,
) -> None:
    """Say what a model is: its size, context, architecture, how it is stored, its licence, who can draft for it."""
    from paceline.cli.model_facts import read_facts
    from paceline.models.load.resolve import resolve

    name = model or options.DEFAULT_MODEL
    with loading_bars() as progress:
        path = resolve(model, progress=progress)
    facts = read_facts(name, path)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in facts.items():
        if value not in (None, [], ""):
            table.add_row(key.replace("_", " "), _shown(key, value))
    console().print(table, markup=False)


def _shown(key: str, value: Any) -> str:
    if key == "bytes":
        return size(value)
    if key == "parameters":
        return f"{value / 1e9:.2f} billion" if value >= 1e9 else f"{value / 1e6:.0f} million"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
