"""quantize(): calibrate, round, write, and measure before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.engine.build import choose_device
from paceline.errors import ConfigError
from paceline.measure.perplexity import BASELINE, Format, scorer, windows
from paceline.measure.text_files import read_text
from paceline.models.config import ModelConfig
from paceline.models.load.checkpoint import Checkpoint
from paceline.models.load.opening import open_checkpoint
from paceline.models.load.quantised.codes import Codes
from paceline.models.load.resolve import resolve
from paceline.models.load.weights import EMPTY, Weights
from paceline.models.registry import build
from paceline.models.tokenizer import Tokenizer
from paceline.quantize import layouts, rounding
from paceline.quantize.awq import Folds, error_of, search
from paceline.quantize.calibrate import WINDOW, Inputs, layer_inputs
from paceline.quantize.gptq import compensated_groups_of_int4
from paceline.quantize.plan import Job, choose_group_size, fitting, in_floats, matrices
from paceline.quantize.sites import Site, check_known, known
from paceline.quantize.writer import FolderWriter, new_folder, write_tokenizer

Progress = Callable[[str, int, int | None], None]
_FLOATS = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class QuantizeReport:
    """What was written, and the perplexities (None: no text to measure on)."""

    to: str
    out: Path
    matrices: int
    """In few bits."""
    in_floats: int
    """Matrices of the layers that the format cannot hold."""
    group_size: int | None
    bytes: int
    measured_tokens: int
    before: float | None
    after: float | None
    output_error: tuple[float, float] | None = None
    """4 bits, calibrated: squared error of all sampled outputs, rounded plainly and as written."""
    outlier_columns: int | None = None
    """Of all matrices together."""

    @property
    def loss_percent(self) -> float | None:
        return None if self.before is None or self.after is None else 100 * (self.after / self.before - 1)


@dataclass
class Calibration:
    """What the text said: AWQ's scales, matrices already rounded, or which columns stay in floats."""

    folds: Folds = field(default_factory=Folds)
    codes: dict[str, Codes] = field(default_factory=dict)
    outliers: dict[str, torch.Tensor] = field(default_factory=dict)
    errors: list[tuple[float, float]] = field(default_factory=list)
    """Of each site, as in QuantizeReport.output_error."""

    @property
    def output_error(self) -> tuple[float, float] | None:
        if not self.errors:
            return None
        return sum(plain for plain, _ in self.errors), sum(written for _, written in self.errors)


def quantize(job: Job, progress: Progress) -> QuantizeReport:
    """Everything is checked before the first tensor is rounded; a run that fails before all is written leaves nothing
    behind."""
    job.check()
    texts = {path: read_text(path) for path in (job.text, job.measure) if path is not None}
    device = str(choose_device(job.device))
    with open_checkpoint(resolve(job.model, progress=progress)) as checkpoint:
        shape = ModelConfig.from_dict(checkpoint.config)
        if job.needs_text:
            check_known(shape, "--to awq" if job.to == "awq" else "--outliers")
        calibrates = job.needs_text or (job.to == "int4" and job.text is not None and known(shape))
        calibration_ids, measured_ids = _tokens(job, texts, checkpoint, job.calibration_tokens if calibrates else 0)
        shapes = matrices(checkpoint)
        size = choose_group_size(job, shapes)
        chosen = fitting(job, shapes, size)
        with new_folder(job.out) as folder:
            calibration = _calibrate(job, checkpoint, calibration_ids, chosen, size, device, progress)
            written = _write(job, checkpoint, chosen, size, calibration, folder, progress)
        before = _perplexity("perplexity before", checkpoint, measured_ids, device, progress)
    with open_checkpoint(folder) as rounded:
        after = _perplexity("perplexity after", rounded, measured_ids, device, progress)
    columns = sum(len(columns) for columns in calibration.outliers.values())
    return QuantizeReport(job.to, folder, len(chosen), len(shapes) - len(chosen), None if job.to == "int8" else size,
                          written, len(measured_ids), before, after, calibration.output_error,
                          None if job.outliers is None else columns)


def _tokens(job: Job, texts: dict[Path, str], checkpoint: Checkpoint, used: int) -> tuple[list[int], list[int]]:
    """(`used` tokens to calibrate with, those to measure on): from one text its beginning and what follows, so that
    nothing is measured that was calibrated with."""
    if not texts:
        return [], []
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is None:
        raise ConfigError("This model came without a tokenizer, so a text cannot become its tokens: leave the text "
                          "out and use --to int8 or int4.")
    ids = {path: tokenizer.encode(text, add_special=False) for path, text in texts.items()}
    calibration = ids[job.text][:used] if job.text is not None else []
    if used and len(calibration) < 2:
        raise ConfigError(f"{job.text} has fewer than two tokens: give a longer text.")
    source = job.measure or job.text
    assert source is not None
    rest = ids[source] if job.measure is not None else ids[source][used:]
    return calibration, rest[:job.measured_tokens] if len(rest) > 1 else []


def _calibrate(job: Job, checkpoint: Checkpoint, tokens: list[int], chosen: set[str], size: int, device: str,
               progress: Progress) -> Calibration:
    found = Calibration()
    if not tokens:
        return found
    shape = ModelConfig.from_dict(checkpoint.config)
    model = build(shape, Weights(checkpoint, device=device), min(WINDOW, len(tokens)))
    for layer, inputs in enumerate(layer_inputs(model, tokens, device)):
        progress("calibrating, layer by layer", layer, shape.num_layers)
        for site, seen in inputs:
            names = [f"{consumer}.weight" for consumer in site.consumers]
            if job.outliers is not None:
                columns = torch.nonzero(seen.peak >= job.outliers).flatten().cpu()
                found.outliers |= dict.fromkeys(names, columns)
            elif chosen.issuperset(names):
                _fit(job, site, seen, names, checkpoint, size, found)
    progress("calibrating, layer by layer", shape.num_layers, shape.num_layers)
    return found


def _fit(job: Job, site: Site, seen: Inputs, names: list[str], checkpoint: Checkpoint, size: int,
         found: Calibration) -> None:
    """4 bits for one site: AWQ's scales, or GPTQ's codes."""
    if job.to == "awq":
        scales, plain, written = search(site, seen, size)
        found.folds.add(site, scales.cpu())
    else:
        plain = error_of(seen, rounding.groups_of_int4(seen.weight, size).floats())
        codes = compensated_groups_of_int4(seen.weight.cpu(), seen.gram.cpu(), size)
        written = error_of(seen, codes.floats().to(seen.weight.device))
        rows = [checkpoint.shape(name)[0] for name in names]
        found.codes |= dict(zip(names, codes.split(rows), strict=True))
    found.errors.append((plain, written))


def _write(job: Job, checkpoint: Checkpoint, chosen: set[str], size: int, calibration: Calibration, folder: Path,
           progress: Progress) -> int:
    layout = _layout(job, size, in_floats(checkpoint, chosen))
    writer = FolderWriter(folder)
    names = [name for name in checkpoint.names() if not name.endswith(EMPTY)]  # masks, which are no floats
    for number, name in enumerate(names):
        progress("rounding", number, len(names))
        if name in chosen:
            codes = calibration.codes.get(name)
            if codes is None:
                weight = calibration.folds.apply(name, checkpoint.tensor(name))
                codes = _rounded(job, weight, size, calibration.outliers.get(name))
            for part, tensor in layout.parts(codes).items():
                writer.add(f"{name.removesuffix('.weight')}.{part}", tensor)
        elif calibration.folds.touches(name):
            writer.add(name, calibration.folds.apply(name, checkpoint.tensor(name)))
        else:
            writer.add(name, checkpoint.tensor(name, _FLOATS.get(checkpoint.stored_type(name), torch.float16)))
        checkpoint.let_go()
    progress("rounding", len(names), len(names))
    writer.finish(_config(checkpoint, layout))
    write_tokenizer(checkpoint, folder)
    return writer.bytes


def _rounded(job: Job, weight: torch.Tensor, size: int, columns: torch.Tensor | None) -> Codes:
    if job.to == "int8":
        return rounding.rows_of_int8(weight, columns)
    return rounding.groups_of_int4(weight, size) if job.to == "int4" else rounding.zeroed_groups_of_int4(weight, size)


def _layout(job: Job, size: int, others: list[str]) -> layouts.FileLayout:
    if job.outliers is not None:
        return layouts.int8_outliers(job.outliers)
    if job.to == "int8":
        return layouts.int8(others)
    return layouts.int4(size, others) if job.to == "int4" else layouts.int4_awq(size, others)


def _config(checkpoint: Checkpoint, layout: layouts.FileLayout) -> dict[str, Any]:
    kept = {key: value for key, value in checkpoint.config.items()
            if key not in ("quantization_config", "compression_config")}
    return kept | {"quantization_config": layout.config}


def _perplexity(stage: str, checkpoint: Checkpoint, tokens: list[int], device: str,
                progress: Progress) -> float | None:
    """Of the weights as they stand, multiplied in float32: what rounding them costs and nothing else."""
    parts = list(windows(tokens, WINDOW))
    if not parts:
        return None
    progress(stage, 0, len(parts))
    measure = scorer(Format(BASELINE), checkpoint, min(WINDOW, len(tokens)), torch.get_num_threads(), device)
    surprise = 0.0
    for number, part in enumerate(parts):
        surprise += measure.surprise(part)
        progress(stage, number + 1, len(parts))
    return math.exp(surprise / sum(len(part) - 1 for part in parts))
