"""Quantised tensors for tests, packed value by value as the formats' papers describe them, and expanded again by loops
that share nothing with the code under test."""

from __future__ import annotations

import numpy as np
import torch

RNG = np.random.default_rng(5)
AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
"""Output -> which four bits of the word hold it."""


def word(values: list[int], bits: int) -> int:
    """An int32 whose lowest bits are values[0]."""
    total = 0
    for place, value in enumerate(values):
        assert 0 <= value < 2 ** bits
        total |= int(value) << (bits * place)
    return total - 2 ** 32 if total >= 2 ** 31 else total


def scales_of(*shape: int) -> np.ndarray:
    return RNG.uniform(0.01, 0.2, shape).astype(np.float16)


def awq(outputs: int, inputs: int, group: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """(tensors by part, the float matrix they stand for)."""
    groups = inputs // group
    codes, zeros = RNG.integers(0, 16, (inputs, outputs)), RNG.integers(0, 16, (groups, outputs))
    scales = scales_of(groups, outputs)

    def packed(values: np.ndarray) -> torch.Tensor:
        out = np.zeros((values.shape[0], outputs // 8), np.int32)
        for row in range(values.shape[0]):
            for column in range(outputs // 8):
                places = [0] * 8
                for k in range(8):
                    places[AWQ_PLACES[k]] = values[row, 8 * column + k]
                out[row, column] = word(places, 4)
        return torch.from_numpy(out)

    weight = np.zeros((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            difference = int(codes[i, o]) - int(zeros[i // group, o])
            weight[o, i] = np.float32(difference) * np.float32(scales[i // group, o])
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": torch.from_numpy(scales)}, weight


def gptq(outputs: int, inputs: int, group: int, *, bits: int = 4, version: int = 1, act_order: bool = False,
         symmetric: bool = False) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    groups, levels, count = inputs // group, 2 ** bits, 32 // bits
    codes = RNG.integers(0, levels, (inputs, outputs))
    zeros = np.full((groups, outputs), levels // 2) if symmetric else RNG.integers(0, levels, (groups, outputs))
    scales = scales_of(groups, outputs)
    group_of = [i // group for i in range(inputs)]
    if act_order:
        RNG.shuffle(group_of)
    qweight = np.zeros((inputs // count, outputs), np.int32)
    for row in range(inputs // count):
        for o in range(outputs):
            qweight[row, o] = word([codes[row * count + k, o] for k in range(count)], bits)
    qzeros = np.zeros((groups, outputs // count), np.int32)
    for row in range(groups):
        for column in range(outputs // count):
            stored = [int(zeros[row, column * count + k]) for k in range(count)]
            qzeros[row, column] = word([(z - 1) % levels if version == 1 else z for z in stored], bits)
    weight = np.zeros((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            g = group_of[i]
            weight[o, i] = np.float32(int(codes[i, o]) - int(zeros[g, o])) * np.float32(scales[g, o])
    parts = {"qweight": torch.from_numpy(qweight), "qzeros": torch.from_numpy(qzeros),
             "scales": torch.from_numpy(scales), "g_idx": torch.tensor(group_of, dtype=torch.int32)}
    return parts, weight


def compressed_int8(outputs: int, inputs: int, groups: int | None = 1, *, bits: int = 8,
                    symmetric: bool = True) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """groups None: one scale for the tensor. Codes of fewer bits lie in whole bytes all the same."""
    half = 2 ** (bits - 1)
    codes = RNG.integers(-half, half, (outputs, inputs)).astype(np.int8)
    scales = scales_of(1) if groups is None else scales_of(outputs, groups)
    zeros = np.zeros_like(scales, np.int8) if symmetric else RNG.integers(-20, 20, scales.shape).astype(np.int8)
    weight = np.zeros((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            at = 0 if groups is None else (o, i // (inputs // groups))
            weight[o, i] = np.float32(int(codes[o, i]) - int(zeros[at])) * np.float32(scales[at])
    parts = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zeros)
    return parts, weight


def compressed_packed(outputs: int, inputs: int, group: int, *, bits: int = 4,
                      symmetric: bool = True) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    groups, count, half = inputs // group, 32 // bits, 2 ** (bits - 1)
    codes = RNG.integers(-half, half, (outputs, inputs))
    scales = scales_of(outputs, groups)
    zeros = np.zeros((outputs, groups), int) if symmetric else RNG.integers(-half, half, (outputs, groups))
    weight_packed = np.zeros((outputs, -(-inputs // count)), np.int32)
    for o in range(outputs):
        for column in range(weight_packed.shape[1]):
            values = [codes[o, i] + half if (i := column * count + k) < inputs else 0 for k in range(count)]
            weight_packed[o, column] = word(values, bits)
    zero_packed = np.zeros((-(-outputs // count), groups), np.int32)
    for row in range(zero_packed.shape[0]):
        for g in range(groups):
            values = [zeros[o, g] + half if (o := row * count + k) < outputs else 0 for k in range(count)]
            zero_packed[row, g] = word(values, bits)
    weight = np.zeros((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            weight[o, i] = np.float32(int(codes[o, i] - zeros[o, i // group])) * np.float32(scales[o, i // group])
    parts = {"weight_packed": torch.from_numpy(weight_packed), "weight_scale": torch.from_numpy(scales),
             "weight_shape": torch.tensor([outputs, inputs])}
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zero_packed)
    return parts, weight


def compressed_config(bits: int = 8, form: str = "int-quantized", **weights: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel",
                                           **weights}}}}
