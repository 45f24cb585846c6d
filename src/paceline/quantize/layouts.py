"""Codes to the tensors and the quantization_config of the format that holds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.models.load.quantised import awq
from paceline.models.load.quantised.codes import Codes, pack_low_first

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FileLayout:
    """parts: Codes -> tensors by part. config: what config.json says of it."""

    parts: Callable[[Codes], Tensors]
    config: dict[str, Any]


def int8(in_floats: list[str]) -> FileLayout:
    """`in_floats`, here and below: the modules that are stored as they were. Others than Paceline make a model's layers
    before they look at its tensors, so the config has to name them."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return FileLayout(_rows, {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": in_floats,
                              "quantization_status": "compressed", "config_groups": groups})


def int8_outliers(threshold: float) -> FileLayout:
    return FileLayout(_rows, {"quant_method": "int8-outliers", "bits": 8, "threshold": threshold})


def int4(group_size: int, in_floats: list[str]) -> FileLayout:
    # Some readers know the list and some the patterns, of which "-:" takes out what matches.
    patterns: dict[str, Any] = {f"-:^{re.escape(module)}$": {} for module in in_floats}
    return FileLayout(_gptq, {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": False,
                              "sym": True, "checkpoint_format": "gptq", "lm_head": False,
                              "modules_to_not_convert": in_floats, "dynamic": patterns})


def int4_awq(group_size: int, in_floats: list[str]) -> FileLayout:
    return FileLayout(_awq, {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True,
                             "version": "gemm", "modules_to_not_convert": in_floats})


def _rows(codes: Codes) -> Tensors:
    parts = {"weight": codes.codes, "weight_scale": codes.scales}
    if codes.outliers is not None and len(codes.outliers.columns):
        parts |= {"outlier_columns": codes.outliers.columns, "outlier_weight": codes.outliers.values}
    return parts


def _gptq(codes: Codes) -> Tensors:
    zeros = _zeros(codes)
    group_of = torch.arange(codes.codes.shape[1], dtype=torch.int32) // (codes.codes.shape[1] // zeros.shape[0])
    return {"qweight": pack_low_first(codes.codes.T, 4, axis=0), "qzeros": pack_low_first(zeros - 1 & 15, 4, axis=1),
            "scales": codes.scales.T.contiguous(), "g_idx": group_of}


def _awq(codes: Codes) -> Tensors:
    return {"qweight": awq.pack(codes.codes.T), "qzeros": awq.pack(_zeros(codes)),
            "scales": codes.scales.T.contiguous()}


def _zeros(codes: Codes) -> torch.Tensor:
    """[groups, out] int16."""
    assert codes.zeros is not None, "4-bit codes have zero points"
    return codes.zeros.T.to(torch.int16)
