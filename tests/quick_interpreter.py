"""Triton's interpreter, several times faster: it need not prepare its language anew for every call in a kernel, nor
make the types of its tensors anew for every operation. What a kernel computes is the same, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# Operators, the builder's name for each, and whether the answer is a truth value.
OPERATORS = {"add": ("add", False), "sub": ("sub", False), "mul": ("mul", False), "and": ("and", False),
             "or": ("or", False), "xor": ("xor", False), "lshift": ("shl", False), "lt": ("icmpSLT", True),
             "le": ("icmpSLE", True), "gt": ("icmpSGT", True), "ge": ("icmpSGE", True), "eq": ("icmpEQ", True),
             "ne": ("icmpNE", True)}
REFLECTED = ("add", "sub", "mul")
FLOATS = {"fp32": np.float32, "fp64": np.float64}
INTEGERS = {"int32": np.int32, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64}
LIMITS = {name: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for name, kind in INTEGERS.items()}
PLAIN = {*FLOATS, *INTEGERS, "int1"}


class _Kept:
    def restore(self) -> None:
        """What was prepared stays until the kernel ends."""


class _Types:
    """The types of blocks, each made and validated once, and their shapes, one object per shape."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.make = core.block_type.__init__
        self.shapes: dict[tuple[int, ...], Any] = {}
        self.known: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.common: dict[tuple[int, int], Any] = {}
        self.scalar = (core.tuple([]), core.constexpr(1))

    def block(self, element: Any, shape: Any) -> Any:
        """The type of blocks of `shape` (a sequence of integers or constants): always the same object."""
        core = self.core
        sizes = tuple([size.value if size.__class__ is core.constexpr else size for size in shape])
        # By name: a type of pointers is made anew for every kernel.
        found = self.known.get((element.name, sizes))
        if found is None:
            found = object.__new__(core.block_type)
            self.make(found, element, list(sizes))
            found.shape = self.shapes.setdefault(sizes, found.shape)
            found.of_tensor = (core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(found.numel))
            self.known[element.name, sizes] = found
        return found

    def joined(self, left: Any, right: Any, element: Any) -> Any:
        """The type of `element`s in the shape that `left` and `right` have together. None: not to be said quickly."""
        block = self.core.block_type
        if left.__class__ is not block:
            if right.__class__ is not block:
                return element
            left = right
        elif right.__class__ is block and left.shape is not right.shape:
            key = id(left.shape), id(right.shape)
            if key not in self.common:
                self.common[key] = self._together(left.shape.values, right.shape.values)
            shape = self.common[key]
            return None if shape is None else self.block(element, shape)
        return left if left.element_ty is element else self.block(element, left.shape.values)

    @staticmethod
    def _together(left: list[int], right: list[int]) -> list[int] | None:
        if len(left) != len(right) or any(1 not in (a, b) and a != b for a, b in zip(left, right, strict=True)):
            return None
        return [max(pair) for pair in zip(left, right, strict=True)]

    def quicken(self, patch: pytest.MonkeyPatch) -> None:
        core, scalar = self.core, self.scalar

        def init_block(made: Any, element_ty: Any, shape: Any) -> None:
            made.__dict__.update(self.block(element_ty, shape).__dict__)

        def init_tensor(made: Any, handle: Any, type: Any) -> None:
            made.handle, made.type, made.dtype = handle, type, type.scalar
            made.shape, made.numel = type.of_tensor if type.__class__ is core.block_type else scalar

        patch.setattr(core.block_type, "__init__", init_block)
        patch.setattr(core.block_type, "with_element_ty", lambda one, element: self.block(element, one.shape.values))
        # In the interpreter a type stands for itself.
        patch.setattr(core.block_type, "to_ir", lambda one, builder: one)
        patch.setattr(core.tensor, "__init__", init_tensor)


def _operator(name: str, create: Callable[[Any, Any], Any], truth: bool, turned: bool, types: _Types) -> Any:
    """The tensors' method `name`: at once for the usual operands (numbers and tensors of the same plain type), by
    Triton's own method for all others. NumPy broadcasts as Triton does."""
    from triton.runtime import interpreter

    core = types.core
    slow, semantic = getattr(core.tensor, name), interpreter.interpreter_semantic
    pointers = name == "__add__"

    def method(one: Any, other: Any) -> Any:
        kind, mine = other.__class__, one.dtype
        if kind is core.constexpr:
            other = other.value
            kind = other.__class__
        known = mine.name
        if kind is core.tensor:
            if other.dtype is mine and known in PLAIN:
                handle, combine = other.handle, create
            elif pointers and mine.__class__ is core.pointer_type and other.dtype.name in ("int32", "int64"):
                handle, combine = other.handle, interpreter.interpreter_builder.create_addptr
            else:
                return slow(one, other, _semantic=semantic)
            result = types.joined(one.type, other.type, core.int1 if truth else mine)
            if result is None:
                return slow(one, other, _semantic=semantic)
        else:
            if kind is int and known in INTEGERS and LIMITS[known][0] <= other <= LIMITS[known][1]:
                data = np.array([other], dtype=INTEGERS[known])
            elif (kind is float or kind is int) and known in FLOATS and name not in ("__and__", "__or__", "__xor__"):
                data = np.array([other], dtype=FLOATS[known])
            else:
                return slow(one, other, _semantic=semantic)
            handle, combine = interpreter.TensorHandle(data, mine), create
            result = types.joined(one.type, mine, core.int1) if truth else one.type
        return core.tensor(combine(handle, one.handle) if turned else combine(one.handle, handle), result)

    return method


def _operators(types: _Types) -> dict[str, Any]:
    from triton.runtime import interpreter

    made = {}
    for name, (builders, truth) in OPERATORS.items():
        create = getattr(interpreter.interpreter_builder, f"create_{builders}")
        made[f"__{name}__"] = _operator(f"__{name}__", create, truth, False, types)
        if name in REFLECTED:
            made[f"__r{name}__"] = _operator(f"__r{name}__", create, truth, True, types)
    return made


def _quicken_helpers(patch: pytest.MonkeyPatch, types: _Types) -> None:
    """What every operation asks: NumPy's name of a type, the value of a constant, whether shapes agree."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core = types.core
    unwrap, name_of = core._unwrap_if_constexpr, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value
    numpys: dict[str, Any] = {}
    themselves = {core.tensor, core.dtype, core.pointer_type, int, float, bool, type(None)}

    def quick_unwrap(value: Any) -> Any:
        kind = value.__class__
        if kind in themselves:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def quick_name(type: Any) -> Any:
        found = numpys.get(type.name)
        if found is None:
            found = numpys[type.name] = name_of(type)
        return found

    def quick_fit(array: Any, type: Any) -> bool:
        return type.__class__ is core.pointer_type or array.itemsize * 8 <= max(8, type.primitive_bitwidth)

    def quick_broadcast(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if a.__class__ is core.block_type:
            if b.__class__ is core.block_type and a.shape is b.shape:
                return left, right
        elif b.__class__ is not core.block_type:
            return left, right
        return broadcast(self, left, right)

    patch.setattr(core, "_unwrap_if_constexpr", quick_unwrap)
    patch.setattr(interpreter, "_get_np_dtype", quick_name)
    patch.setattr(interpreter, "_validate_np_data_size", quick_fit)
    patch.setattr(TritonSemantic, "broadcast_impl_value", quick_broadcast)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Prepare the language once per kernel and module instead of once per call, types once instead of once per
    operation, and do the usual operations at once. The result of a call is the same."""
    from triton.language import core
    from triton.runtime import interpreter

    prepare, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()
    types = _Types(core)
    operators = _operators(types)

    def once(function):
        if id(function.__globals__) in prepared:
            return _Kept()
        prepared.add(id(function.__globals__))
        scope = prepare(function)
        # The scope knows what stood there before: these go with it.
        for name, method in operators.items():
            setattr(core.tensor, name, method)
        return scope

    def fresh(self, *args, **kwargs):
        prepared.clear()
        # Numbers that do not matter (masked ones) overflow or are not numbers, as they do on the device.
        with np.errstate(all="ignore"):
            return run(self, *args, **kwargs)

    # Each addition and multiplication is otherwise done a second time in 64 bits, to see whether it overflows.
    lenient = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", lenient)
    patch.setattr(interpreter, "_patch_lang", once)
    patch.setattr(interpreter.GridExecutor, "__call__", fresh)
    types.quicken(patch)
    _quicken_helpers(patch, types)
