"""The `paceline` command: one module per sub-command, one place where errors become sentences."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import bench, chat, doctor, generate, models, plan, quantize, replay, serve, train, verify
from paceline.cli.pulling import pulls
from paceline.cli.terminal import print_error
from paceline.errors import PacelineError

USER_ERROR = 2

app = typer.Typer(
    name="paceline",
    help="LLM inference with speculative decoding as the first-class citizen; exact by contract.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(pulls(chat.chat))
app.command("generate")(pulls(generate.generate))
app.command("pull")(models.pull)
app.command("list")(models.list_models)
app.command("rm")(models.rm)
app.command("show")(pulls(models.show))
app.command("doctor")(doctor.doctor)
app.command("replay")(pulls(replay.replay))
app.command("verify")(pulls(verify.verify))
app.command("plan")(pulls(plan.plan))
app.command("quantize")(pulls(quantize.quantize))
app.command("serve")(pulls(serve.serve, serve.of_tables))
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 fine, 1 a check failed, 2 a mistake that the text explains."""
    _replace_what_cannot_be_shown()
    try:
        app(args=argv, prog_name="paceline")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except PacelineError as error:
        if os.environ.get("PACELINE_DEBUG"):
            raise
        print_error(error)
        return USER_ERROR
    except OSError as problem:  # of a file or an output that nobody has foreseen: a full disk, a closed stdout
        if os.environ.get("PACELINE_DEBUG"):
            raise
        print_error(PacelineError(f"The system said: {problem}. PACELINE_DEBUG=1 shows where."))
        return USER_ERROR
    return 0


def _replace_what_cannot_be_shown() -> None:
    """A terminal that has no character for a dash or an accent shows a question mark, and the command goes on."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
