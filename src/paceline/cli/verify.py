"""`paceline verify`: does a verify step give the bits of a decode step, for this model on this machine?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.plain import plain
from paceline.cli.terminal import console, loading_bars

if TYPE_CHECKING:
    from paceline.watch.step_bits import BitsReport

NOT_KEPT = 1


def verify(
    model: options.ModelArgument = None,
    positions: Annotated[int, typer.Option("--positions", "-n", help="Output tokens whose logits are compared in each "
                                                                     "circumstance.")] = 64,
    rows: Annotated[int, typer.Option(help="Drafted tokens of the longest verify step.")] = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = "auto",
    quantization: options.Quantization = None,
    deterministic: options.Deterministic = None,
    kernels: options.KernelChoice = "auto",
    max_model_len: options.MaxModelLen = None,
    as_json: options.Json = False,
) -> None:
    """Compare the bits of verify steps with those of plain decode steps: chains and trees of drafts, right and wrong
    ones, alone and in company, behind prompts in chunks. Exit code 1: this mode promises the same bits and does not
    give them. `doctor` checks the kernels alone, in a second and without a model."""
    from paceline.config import EngineOptions
    from paceline.engine.build import build_engine
    from paceline.watch.step_bits import verify_steps

    with loading_bars() as progress:
        engine = build_engine(EngineOptions.of(
            model=model, device=device, dtype=dtype, kv_dtype=kv_dtype, quantization=quantization,
            deterministic=deterministic, kernels=kernels, max_model_len=max_model_len, heads=()), progress)
    report = verify_steps(engine, model or options.DEFAULT_MODEL, positions, rows)
    if as_json:
        print(json.dumps(plain(report), indent=2))
    else:
        show(report)
    if report.broken:
        raise typer.Exit(NOT_KEPT)


def show(report: BitsReport) -> None:
    """The report for a person."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1))
    table.add_column("the same bits in", no_wrap=True)
    for title in ("logits", "cache", "first not", "largest", "KL"):
        table.add_column(title, justify="right")
    for one in report.compared:
        first = "-" if one.first_difference is None else f"{one.first_difference}"
        table.add_row(one.name, f"{one.equal} of {one.positions}", f"{one.kv_equal} of {one.kv_positions}", first,
                      f"{one.largest_difference:.2g}", f"{one.kl:.2g}")
    out = console()
    out.print(table)
    out.print(f"\n{report.verdict}", style="green" if report.holds else "red" if report.broken else "yellow",
              markup=False)
