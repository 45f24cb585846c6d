"""`paceline quantize`: a model in fewer bits, written as a folder that Paceline (and others) load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.plain import plain
from paceline.cli.terminal import loading_bars

if TYPE_CHECKING:
    from paceline.quantize.run import QuantizeReport

_TO = "int8 (one scale per row), int4 (symmetric groups, GPTQ's layout) or awq (4 bits, scales searched on a text)."


def quantize(
    model: options.ModelArgument = None,
    to: Annotated[str, typer.Option("--to", help=_TO)] = "int8",
    text: Annotated[Path | None, typer.Option(
        help="UTF-8 text, plain or .gz: awq and --outliers calibrate on its beginning, perplexity is measured on what "
             "follows.")] = None,
    measure: Annotated[Path | None, typer.Option(help="Another text to measure perplexity on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: the model's name and the target, here.",
                                             )] = None,
    group_size: Annotated[int | None, typer.Option(
        help="Columns that share a scale in 4 bits: 32, 64 or 128. Default: 128, or 32 where it does not fit.")] = None,
    outliers: Annotated[float | None, typer.Option(
        help="With int8: inputs that reach this on the text keep their columns in floats (LLM.int8 uses 6).")] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to calibrate with.")] = 4096,
    measured_tokens: Annotated[int, typer.Option(help="Tokens to measure perplexity on.")] = 4096,
    device: Annotated[str, typer.Option(help="Where calibration and measuring run: cpu, cuda or auto.")] = "cpu",
    as_json: options.Json = False,
) -> None:
    """Round a model to 8 or 4 bits, and say what that costs."""
    from paceline.quantize.plan import Job
    from paceline.quantize.run import quantize as run

    out = out or Path(f"{_name(model or options.DEFAULT_MODEL)}-{to}")
    job = Job(model=model, to=to, out=out, text=text, measure=measure, group_size=group_size, outliers=outliers,
              calibration_tokens=calibration_tokens, measured_tokens=measured_tokens, device=device)
    with loading_bars() as progress:
        report = run(job, progress)
    if as_json:
        typer.echo(json.dumps(plain(report) | {"loss_percent": report.loss_percent}))
    else:
        for line in _lines(report):
            typer.echo(line)


def _name(model: str) -> str:
    """Of a folder, a file or a hub id; "." and ".." have that of the folder they stand for."""
    return Path(os.path.abspath(Path(model).expanduser())).name.removesuffix(".gguf").replace(":", "-")


def _lines(report: QuantizeReport) -> list[str]:
    groups = "" if report.group_size is None else f", groups of {report.group_size}"
    lines = [f"{report.out}: {report.matrices} matrices as {report.to}{groups}, {report.bytes / 1e6:.1f} MB."]
    if report.in_floats:
        lines.append(f"{report.in_floats} matrices stayed in floats: their shapes do not fit the format.")
    if report.outlier_columns is not None:
        lines.append(f"{report.outlier_columns} outlier columns in floats, all matrices together.")
    if report.output_error is not None:
        plain_error, error = report.output_error
        lines.append(f"Squared error of the layers' outputs: {error / plain_error:.1%} of plain rounding's."
                     if plain_error else "Plain rounding is exact here.")
    if report.before is None or report.after is None:
        lines.append("No perplexity report: give a text (--text or --measure; long enough to have some beyond what "
                     "calibration takes).")
    else:
        lines.append(f"Perplexity on {report.measured_tokens:,} tokens: {report.before:.3f} before, {report.after:.3f} "
                     f"after ({report.loss_percent:+.2f} %).")
    return lines
