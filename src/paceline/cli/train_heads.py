"""`paceline train dspark ...`: a command for each kind of drafter, with the options of training.options."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.pulling import pulls
from paceline.cli.terminal import console
from paceline.errors import ConfigError
from paceline.training.options import HELP, KINDS, TrainOptions, option_names

if TYPE_CHECKING:
    from paceline.training.news import News

INTERRUPTED = 130
_ABOUT = {
    "dspark": "Train a DSpark head: a block of tokens in one pass, a Markov head, a confidence head.",
    "eagle3": "Train an EAGLE-3 head: a layer that is fed with its own output.",
    "medusa": "Train Medusa heads: one small network for each token to come.",
    "hydra": "Train Hydra heads: like Medusa's, but each sees the tokens drafted before.",
    "draft": "Distil a draft model: some layers of the target that learn to write as all of them do.",
    "prune": "Leave out the target's least important layers, heads and features, and distil what is left.",
    "mtp": "Train an MTP layer (DeepSeek's multi-token prediction), used again and again.",
}
_SHORT = {"model": "-m", "out": "-o", "data": "-d"}


def add_to(app: typer.Typer) -> None:
    for kind in KINDS:
        app.command(kind, help=_ABOUT[kind])(pulls(command(kind)))


def command(kind: str) -> Callable[..., None]:
    """With a parameter for each option."""

    def run(**given: Any) -> None:
        as_json = given.pop("as_json")
        train(TrainOptions(kind=kind, **{name: _value(name, value) for name, value in given.items()}), as_json)

    parameters = [_parameter(name) for name in option_names()]
    parameters.append(inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameter(name: str) -> inspect.Parameter:
    field = TrainOptions.__dataclass_fields__[name]
    spelled = str(field.type)
    kind: Any
    default: Any = field.default
    if name == "data":
        kind, default = list[Path], []
    elif spelled.startswith("tuple"):
        kind, default = str, ",".join(map(str, default))
    else:
        kind = {"int": int, "float": float, "str": str, "Path": Path}[spelled.split(" |")[0]]
        kind = kind | None if default is None else kind
    flags = ["--" + name.replace("_", "-"), *([_SHORT[name]] if name in _SHORT else [])]
    needed = name == "out"
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY,
                             annotation=Annotated[kind, typer.Option(*flags, help=HELP[name])],
                             default=inspect.Parameter.empty if needed else default)


def _value(name: str, given: Any) -> Any:
    spelled = str(TrainOptions.__dataclass_fields__[name].type)
    if name == "data":
        return tuple(given)
    if not spelled.startswith("tuple"):
        return given
    kind = float if "float" in spelled else int
    try:
        return tuple(kind(part) for part in given.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--{name.replace('_', '-')} are numbers, separated by commas, got {given!r}.") from None


def train(options: TrainOptions, as_json: bool) -> None:
    from paceline.training.interrupts import Interrupted
    from paceline.training.run import train as run

    options.check()
    try:
        with progress() as show:
            report = run(options, show)
    except Interrupted as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps({name: value for name, value in report.items() if name not in ("curve", "settings")}))
        return
    if not options.learns:
        typer.echo(f"{report['head']}: {report['parameters'] / 1e6:.2f} M parameters, of the target's layers "
                   f"{', '.join(map(str, report['layers']))}. Give --minutes or --steps to distil it.")
        return
    cycles = ", ".join(f"{value:.2f} with {depth}" for depth, value in report["tokens_per_cycle"].items())
    typer.echo(f"{options.out}: {report['parameters'] / 1e6:.2f} M parameters after {report['steps']:,} steps on "
               f"{report['tokens_learned_from'] / 1e6:.2f} M tokens ({report['answer_tokens'] / 1e6:.2f} M different).")
    typer.echo(f"Tokens a cycle on held-out prompts, greedy, by tokens drafted: {cycles}.")


@contextmanager
def progress() -> Iterator[Callable[[News], None]]:
    """A bar with the newest figures on stderr; without a terminal, a line for each."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda news: print(f"{100 * news.share:5.1f} % {news.stage}: {news.text}", file=sys.stderr, flush=True)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    with Progress(BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.description}"), console=out,
                  transient=True) as bars:
        task = bars.add_task("loading the target", total=1.0)

        def show(news: News) -> None:
            bars.update(task, completed=min(1.0, news.share), description=f"{news.stage}: {news.text}")
            if news.stage in ("measured", "workers"):
                bars.console.print(f"{100 * news.share:5.1f} % {news.text}", markup=False)

        yield show
