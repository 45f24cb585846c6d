"""`paceline bench ...`: runs one of paceline.bench and prints or writes what it measured."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from paceline.cli import options
from paceline.cli.terminal import console
from paceline.errors import ConfigError

app = typer.Typer(
    help="Measure Paceline beside its peers, in one run.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("latency")
def latency(json_target: options.JsonFile = None, model: options.Model = None) -> None:
    """Single-stream decode and prefill, beside transformers."""
    _run("latency", json_target, {"model": model})


@app.command("throughput")
def throughput(json_target: options.JsonFile = None, model: options.Model = None) -> None:
    """Tokens a second with 1, 8 and 32 requests at once, beside transformers."""
    _run("throughput", json_target, {"model": model})


@app.command("overhead")
def overhead(json_target: options.JsonFile = None) -> None:
    """Host work of a step, on a model that costs nothing."""
    _run("overhead", json_target, {})


def _run(name: str, json_target: str | None, given: dict[str, Any]) -> None:
    module = import_module(f"paceline.bench.{name}")
    result = module.run({key: value for key, value in given.items() if value is not None})
    if json_target == "-":
        print(json.dumps(result, indent=2))
        return
    _show(result)
    if json_target is not None:
        try:
            Path(json_target).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {json_target}: {error.strerror}; choose another file.") from None


def _show(result: dict[str, Any]) -> None:
    """The rows as a table: a case, Paceline, each peer, the ratio (above 1: Paceline is better)."""
    from rich.table import Table

    peers = sorted({peer for row in result["rows"] for peer in row.get("peers", {})})
    table = Table()
    for heading in ("case", "unit", "paceline", *peers, "ratio"):
        table.add_column(heading, justify="left" if heading in ("case", "unit") else "right")
    for row in result["rows"]:
        figures = (row["paceline"], *(row.get("peers", {}).get(peer) for peer in peers), row.get("ratio"))
        table.add_row(row["case"], row["unit"], *("" if figure is None else f"{figure:.4g}" for figure in figures))
    out = console()
    out.print(table)
    out.print(str(result["machine"]), style="dim", markup=False)
