"""GPTQ: a column is rounded, and the columns after it, not yet rounded, make up for its error as far as the inputs of
the text allow."""

from __future__ import annotations

import torch

from paceline.models.load.quantised.codes import Codes
from paceline.quantize.rounding import best_symmetric_scales

DAMPING = 0.01
"""Share of the mean that is added to the diagonal: inputs that hardly vary must not be trusted to make up for much."""
BLOCK = 128
"""Columns whose errors are passed on to all later ones together."""


def compensated_groups_of_int4(weight: torch.Tensor, gram: torch.Tensor, size: int) -> Codes:
    """weight [out, in], gram [in, in] = sum of x^T x -> codes like groups_of_int4's. A group's scales are chosen when
    its first column is reached, with all that was passed on to it. `size` divides BLOCK."""
    left = weight.float().clone()
    passing = passing_on(gram)
    columns = left.shape[1]
    codes = torch.empty_like(left, dtype=torch.uint8)
    scales = torch.empty((left.shape[0], columns // size))
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.zeros((left.shape[0], end - begin))
        for column in range(begin, end):
            group = column // size
            if column % size == 0:
                scales[:, group] = best_symmetric_scales(left[:, None, column:column + size])[:, 0]
            value, scale = left[:, column], scales[:, group]
            level = torch.round(value / scale).clamp(-8, 7)
            codes[:, column] = (level + 8).to(torch.uint8)
            error = (value - level * scale) / passing[column, column]
            left[:, column:end] -= error[:, None] * passing[column, column:end]
            errors[:, column - begin] = error
        left[:, end:] -= errors @ passing[begin:end, end:]
    return Codes(codes, scales.half(), torch.full(scales.shape, 8, dtype=torch.uint8), bits=4)


def passing_on(gram: torch.Tensor) -> torch.Tensor:
    """[in, in] upper triangular U with U^T U = (gram + damping)^-1: row i, divided by its diagonal, is how an error of
    column i is spread over those after it once the columns before are fixed."""
    damped = gram.double() + DAMPING * gram.diagonal().double().mean().clamp_min(1e-12) * torch.eye(len(gram))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()
