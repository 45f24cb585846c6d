"""compressed-tensors: integers or 8-bit floats with a scale a tensor, output channel or group of inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.errors import ModelFormatError
from paceline.models.fields import pattern, shown
from paceline.models.load.quantised.codes import Codes, unpack_low_first
from paceline.models.load.quantised.parts import Parts
from paceline.models.load.quantised.settings import Settings

FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
_SCALES = ("F16", "BF16", "F32")
_CLASS, _PATTERN = "Linear", "re:"
"""What targets say of modules that they do not name, and how they name many."""


class CompressedTensors:
    """Scheme: `weight` int8 or float8 [out, in], or `weight_packed` int32 [out, in * bits / 32] with `weight_shape`;
    weight_scale [1], [out, 1] or [out, groups]; weight_zero_point where it is not symmetric; weight_g_idx [in] where
    groups are in order of activation. How activations are to be rounded is not the file's to say here."""

    parts = ("weight_scale", "weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
             "input_scale", "input_zero_point")

    def __init__(self, settings: Settings) -> None:
        settings.one_of("format", FORMATS)
        groups = [Settings(group, settings.where) for group in settings.mapping("config_groups").values()
                  if isinstance(group, Mapping)]
        self._groups = [_group(group) for group in groups if isinstance(group.get("weights"), Mapping)]
        kinds = {(group.bits, group.kind) for group in self._groups}
        if len({bits for bits, _ in kinds}) != 1:
            raise settings.refusal(f"{len(kinds)} kinds of weights in config_groups, where one is read")
        sparsity = settings.mapping("sparsity_config").get("format", "dense")
        if sparsity != "dense":
            raise settings.refusal(f"sparsity format {sparsity!r}")
        self._bits = next(iter(kinds))[0]
        self._packs = settings.get("format") == "pack-quantized"

    @property
    def stored_as(self) -> str:
        return "Q4_1" if self._bits == 4 and self._packs else "Q8_0"

    def shape(self, parts: Parts, module: str) -> tuple[int, int]:
        if not parts.has(module, "weight_packed"):
            rows, columns = parts.shape(module, "weight")
            return rows, columns
        rows, words = parts.shape(module, "weight_packed")
        stored = [int(size) for size in parts.take(module, "weight_shape", (2,), ("I64", "I32"))]
        if stored[0] != rows or -(-stored[1] * self._bits // 32) != words:
            raise ModelFormatError(f"tensor '{module}.weight_shape' in {parts.folder.path} says {stored}, which "
                                   f"'{module}.weight_packed' of shape {[rows, words]} cannot hold.")
        return stored[0], stored[1]

    def read(self, parts: Parts, module: str) -> Codes:
        rows, columns = self.shape(parts, module)
        scales = self._scales(parts, module, rows, columns)
        bits = self._bits
        if not parts.has(module, "weight_packed"):
            bits = 8  # a whole signed byte each, however few of its values are used
            codes = parts.take(module, "weight", (rows, columns), ("I8", "F8_E4M3"))
            zeros = parts.take(module, "weight_zero_point", parts.folder.shape(f"{module}.weight_scale"), ("I8",)) \
                if parts.has(module, "weight_zero_point") else None
            zeros = None if zeros is None else zeros.reshape(-1, scales.shape[1]).expand(rows, -1)
        else:
            codes, zeros = self._packed(parts, module, rows, columns, scales.shape[1])
        group_of = None
        if all(group.in_order for group in self._groups_of(module)) and not parts.has(module, "weight_g_idx"):
            raise ModelFormatError(f"tensor '{module}.weight_g_idx' is missing in {parts.folder.path}, and the config "
                                   "says that groups are in an order of their own: download it again.")
        if parts.has(module, "weight_g_idx"):
            group_of = parts.take(module, "weight_g_idx", (columns,), ("I32", "I64")).to(torch.int64)
            if bool(((group_of < 0) | (group_of >= scales.shape[1])).any()):
                raise ModelFormatError(f"tensor '{module}.weight_g_idx' in {parts.folder.path} names groups outside "
                                       f"of the {scales.shape[1]} that there are: download it again.")
        return Codes(codes, scales, zeros, group_of, bits)

    def _groups_of(self, module: str) -> list[_Group]:
        """Those it may belong to: that name it, else that have all matrices, else any."""
        return [group for group in self._groups if group.names(module)] \
            or [group for group in self._groups if _CLASS in group.targets] or self._groups

    def _packed(self, parts: Parts, module: str, rows: int, columns: int,
                groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Signed numbers are stored from zero: what stands for 0 is 2^(bits - 1), plus the zero point."""
        bits, middle = self._bits, 2 ** (self._bits - 1)
        words = parts.take(module, "weight_packed", (rows, -(-columns * bits // 32)), ("I32",))
        codes = unpack_low_first(words, bits, axis=1)[:, :columns]
        zeros = torch.full((rows, groups), middle, dtype=torch.uint8)
        if parts.has(module, "weight_zero_point"):
            packed = parts.take(module, "weight_zero_point", (-(-rows * bits // 32), groups), ("I32",))
            zeros = unpack_low_first(packed, bits, axis=0)[:rows]
        return codes, zeros

    def _scales(self, parts: Parts, module: str, rows: int, columns: int) -> torch.Tensor:
        """[rows, groups], whatever the strategy."""
        found = parts.folder.shape(f"{module}.weight_scale")
        if found in ((), (1,), (1, 1)):
            return parts.take(module, "weight_scale", found, _SCALES).reshape(1, 1).expand(rows, 1)
        if found == (rows,):
            return parts.take(module, "weight_scale", found, _SCALES)[:, None]
        groups = found[1] if len(found) == 2 else 1
        if groups < 1 or columns % groups:
            groups = 1
        allowed = {group.group_size for group in self._groups_of(module)}
        if None not in allowed and columns // groups not in allowed:
            sizes = " or ".join(map(str, allowed))
            raise ModelFormatError(f"tensor '{module}.weight_scale' in {parts.folder.path} has shape "
                                   f"{list(found)}, which does not scale {columns} columns in groups of "
                                   f"{sizes}: config and weights do not belong together.")
        return parts.take(module, "weight_scale", (rows, groups), _SCALES)


@dataclass(frozen=True)
class _Group:
    """Modules whose weights are stored alike: one of config_groups."""

    targets: tuple[str, ...]
    bits: int
    kind: str
    group_size: int | None
    """Columns that share a scale; None: all of a row, or as many as the scales say."""
    in_order: bool
    """Groups are not neighbouring columns, but those that weight_g_idx says."""

    def names(self, module: str) -> bool:
        return any(re.match(target.removeprefix(_PATTERN), module) is not None if target.startswith(_PATTERN)
                   else target == module for target in self.targets)


def _group(group: Settings) -> _Group:
    weights = Settings(group.mapping("weights"), group.where)
    kind = weights.one_of("type", ("int", "float"), "int")
    bits = weights.one_of("num_bits", (4, 8) if kind == "int" else (8,))
    size = None
    if weights.one_of("strategy", ("tensor", "channel", "group"), "tensor") == "group" \
            and weights.get("group_size") is not None:
        size = weights.group_size()
    return _Group(_targets(group), bits, kind, None if size == -1 else size, weights.get("actorder") == "group")


def _targets(group: Settings) -> tuple[str, ...]:
    targets = group.get("targets", [])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise group.refusal(f"targets {shown(targets)}, which are no list of names")
    for target in targets:
        if target.startswith(_PATTERN):
            try:
                pattern(target.removeprefix(_PATTERN), group.where)
            except ModelFormatError as error:
                raise group.refusal(f"a target that is no pattern ({error})") from error
    return tuple(targets)
