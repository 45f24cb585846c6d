"""`paceline replay`: run a trace again and compare, token by token."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.plain import plain
from paceline.cli.terminal import console, loading_bars

DIFFERENT = 1


def replay(
    trace: Annotated[Path, typer.Argument(help="A file written by `paceline generate --trace FILE`.")],
    model: options.Model = None,
    lora: options.Lora = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Open what the trace drafts with, without asking.")] = False,
) -> None:
    """Reproduce a recorded request. Exit code 0: the same tokens; 1: different."""
    from paceline.engine import replay as engine_replay

    with loading_bars() as progress:
        report = engine_replay.replay(trace, model=model, adapters=options.adapters(lora), progress=progress,
                                      may_open=lambda names: yes or _asked(names))
    if not report.same_model:
        console(stderr=True).print("this is not the model that was recorded (--model or --lora names another)",
                                   style="yellow")
    if as_json:
        print(json.dumps(plain(report), indent=2))
    elif report.equal:
        console().print(f"the same {len(report.tokens)} tokens", style="green")
    else:
        at = report.first_difference
        console().print(
            f"different from token {at} on: expected {_around(report.expected, at)}, got {_around(report.tokens, at)}",
            style="red", markup=False,
        )
    if not report.equal:
        raise typer.Exit(DIFFERENT)


def _asked(names: list[str]) -> bool:
    """Whether the user, if one is there, lets these be opened."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    return typer.confirm(f"The trace drafts with {', '.join(names)}. Open that, or fetch it?", err=True)


def _around(tokens: list[int], at: int | None) -> str:
    if at is None:
        return f"{len(tokens)} tokens"
    shown = " ".join(str(token) for token in tokens[at : at + 5])
    return shown or "the end"
