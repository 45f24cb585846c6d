"""`paceline replay`: run a trace again, set up as it was, and compare, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.plain import plain
from paceline.cli.terminal import console, loading_bars

DIFFERENT = 1
NOT_REBUILT = 3


def replay(
    trace: Annotated[Path, typer.Argument(help="A file written by `paceline generate --trace FILE`, or a server's.")],
    model: options.Model = None,
    lora: options.Lora = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Run it also where something that decides the text is not as "
                                                         "it was.")] = False,
) -> None:
    """Reproduce a recorded request: the options of its engine and its drafts come from the trace. Exit code 0: the same
    tokens; 1: different ones; 3: what was recorded cannot be rebuilt here."""
    from paceline.engine import replay as engine_replay

    with loading_bars() as progress:
        report = engine_replay.replay(trace, model=model, adapters=options.adapters(lora), anyway=anyway,
                                      progress=progress)
    say = console(stderr=True)
    for one in report.differences:
        say.print(str(one), style="yellow", markup=False)
    for one in report.notes if report.differences or not report.equal else ():
        say.print(f"{one} (which should change no text)", style="dim", markup=False)
    if as_json:
        print(json.dumps(plain(report), indent=2))
    elif not report.ran:
        console().print("what was recorded cannot be rebuilt here: change what is named above (--model, --lora), or "
                        "compare all the same (--anyway)", style="red")
    elif report.equal:
        rest = report.recorded - len(report.expected)
        console().print(f"the same {len(report.tokens)} tokens", style="green")
        if rest:
            console().print(f"{rest} further tokens cannot be compared: the trace had no room for their drafts")
    else:
        at = report.first_difference
        console().print(
            f"different from token {at} on: expected {_around(report.expected, at)}, got {_around(report.tokens, at)}",
            style="red", markup=False,
        )
        if not report.deterministic:
            console().print("it was recorded with kernels whose bits depend on the company: texts are the same up to "
                            "numerical ties (deterministic=True has none)")
    if not report.ran:
        raise typer.Exit(NOT_REBUILT)
    if not report.equal:
        raise typer.Exit(DIFFERENT)


def _around(tokens: list[int], at: int | None) -> str:
    if at is None:
        return f"{len(tokens)} tokens"
    shown = " ".join(str(token) for token in tokens[at : at + 5])
    return shown or "the end"
