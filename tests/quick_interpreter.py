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


class _Language:
    """Prepared once for each module of kernels, as Triton does anew for each of its calls, until `prepared` is set to
    False."""

    def __init__(self, prepare: Callable[[Any], Any], methods: dict[str, Any], tensor: Any) -> None:
        self._prepare, self._methods, self._tensor = prepare, methods, tensor
        self._scopes: dict[int, Any] = {}

    @property
    def prepared(self) -> bool:
        return bool(self._scopes)

    @prepared.setter
    def prepared(self, wish: bool) -> None:
        while self._scopes and not wish:
            self._scopes.popitem()[1].restore()

    def for_module(self, function: Any) -> _Language:
        """Prepare it for the module of `function`. What is returned is the scope that a kernel would restore."""
        module = id(function.__globals__)
        if module not in self._scopes:
            self._scopes[module] = self._prepare(function)
            # The scope knows what stood there before: these go with it.
            for name, method in self._methods.items():
                setattr(self._tensor, name, method)
        return self

    def restore(self) -> None:
        """After a kernel: the next one needs it again."""


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
    """The tensors' method `name`: at once for the usual operands (numbers, and tensors of plain types), by Triton's own
    method for all others. NumPy broadcasts as Triton does."""
    from triton.runtime import interpreter

    core, builder, semantic = types.core, interpreter.interpreter_builder, interpreter.interpreter_semantic
    slow = getattr(core.tensor, name)

    def method(one: Any, other: Any) -> Any:
        kind, mine, ours, combine = other.__class__, one.dtype, one.handle, create
        if kind is core.constexpr:
            other = other.value
            kind = other.__class__
        known = mine.name
        if kind is core.tensor:
            its, theirs = other.dtype, other.handle
            if its is mine and known in PLAIN:
                pass
            elif known == "int64" and its.name == "int32":
                theirs = builder.cast_impl(theirs, mine)
            elif known == "int32" and its.name == "int64":
                ours, mine = builder.cast_impl(ours, its), its
            elif name == "__add__" and mine.__class__ is core.pointer_type and its.name in ("int32", "int64"):
                combine = builder.create_addptr
            else:
                return slow(one, other, _semantic=semantic)
            result = types.joined(one.type, other.type, core.int1 if truth else mine)
            if result is None:
                return slow(one, other, _semantic=semantic)
        else:
            if kind is int and known in INTEGERS and LIMITS[known][0] <= other <= LIMITS[known][1]:
                data = np.array([other], dtype=INTEGERS[known])
            elif (kind is float or kind is int) and known in FLOATS:
                data = np.array([other], dtype=FLOATS[known])
            else:
                return slow(one, other, _semantic=semantic)
            theirs = interpreter.TensorHandle(data, mine)
            result = types.joined(one.type, mine, core.int1) if truth else one.type
        return core.tensor(combine(theirs, ours) if turned else combine(ours, theirs), result)

    return method


def _index(types: _Types) -> Any:
    """The tensors' method that adds axes (`x[:, None]`)."""
    from triton.runtime import interpreter

    core, semantic = types.core, interpreter.interpreter_semantic
    slow, whole = core.tensor.__getitem__, slice(None)

    def method(one: Any, places: Any) -> Any:
        if one.type.__class__ is core.block_type and places.__class__ is tuple \
                and all(place is None or (place.__class__ is slice and place == whole) for place in places):
            data = one.handle.data[places]
            return core.tensor(interpreter.TensorHandle(data, one.dtype), types.block(one.dtype, data.shape))
        return slow(one, places, _semantic=semantic)

    return method


def _operators(types: _Types) -> dict[str, Any]:
    from triton.runtime import interpreter

    made = {"__getitem__": _index(types)}
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
        if a.__class__ is not core.block_type:
            return (left, right) if b.__class__ is not core.block_type else (splat(left, b), right)
        if b.__class__ is not core.block_type:
            return left, splat(right, a)
        return (left, right) if a.shape is b.shape else broadcast(self, left, right)

    def splat(scalar: Any, block: Any) -> Any:
        type = types.block(scalar.dtype, block.shape.values)
        return core.tensor(interpreter.interpreter_builder.create_splat(type, scalar.handle), type)

    patch.setattr(core, "_unwrap_if_constexpr", quick_unwrap)
    patch.setattr(interpreter, "_get_np_dtype", quick_name)
    patch.setattr(interpreter, "_validate_np_data_size", quick_fit)
    patch.setattr(TritonSemantic, "broadcast_impl_value", quick_broadcast)


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Prepare the language once per module instead of once per call, types once instead of once per operation, and do
    the usual operations at once. The result of a call is the same."""
    from triton.language import core
    from triton.runtime import interpreter

    run, types = interpreter.GridExecutor.__call__, _Types(core)
    language = _Language(interpreter._patch_lang, _operators(types), core.tensor)

    def quiet(self, *args, **kwargs):
        # Numbers that do not matter (masked ones) overflow or are not numbers, as they do on the device.
        with np.errstate(all="ignore"):
            return run(self, *args, **kwargs)

    # Each addition and multiplication is otherwise done a second time in 64 bits, to see whether it overflows.
    lenient = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", lenient)
    patch.setattr(language, "prepared", True)
    patch.setattr(interpreter, "_patch_lang", language.for_module)
    patch.setattr(interpreter.GridExecutor, "__call__", quiet)
    types.quicken(patch)
    _quicken_helpers(patch, types)
