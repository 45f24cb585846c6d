"""`python tools/tune_kernels.py --json FILE`: the Triton kernels on this card, timed.

For whoever tunes kernels/triton/choices.py and attention.tuning: each kernel at the shapes of two models, in a graph
and with cold operands, over a small grid of settings and beside torch. Needs torch, triton and numpy alone. Whether the
kernels are right is for tests/gpu/kernel_checks.py to say.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from paceline.kernels.device.packing import device_rows
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.triton import load
from paceline.kernels.triton.attention import KeySplit, Tuning, attend, shape_of
from paceline.kernels.triton.choices import Product, Way, choose
from paceline.kernels.triton.linear import product
from paceline.measure.kernel_time import copies, decode_step, microseconds

BF16 = torch.bfloat16
Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """A model, as its kernels see it."""

    name: str
    hidden: int
    inner: int
    vocabulary: int
    heads: Heads

    def products(self) -> Iterator[tuple[str, int, int, bool]]:
        """(name, outputs, inputs, gated)."""
        wide = self.heads.query * self.heads.dim
        yield "qkv", (self.heads.query + 2 * self.heads.keys) * self.heads.dim, self.hidden, False
        yield "out", self.hidden, wide, False
        yield "gate_up", self.inner, self.hidden, True
        yield "down", self.hidden, self.inner, False
        yield "head", self.vocabulary, self.hidden, False


SHAPES = (Shape("8b", 4096, 14336, 128256, Heads(32, 8, 128)), Shape("135m", 576, 1536, 49152, Heads(9, 3, 64)))


class Bench:
    """Collects rows and keeps to a time limit: what is left out says so. `warm`: only compiles, for another process."""

    def __init__(self, device: torch.device, seconds: float, warm: bool = False) -> None:
        self.device = device
        self._warm = warm
        self.rows: list[dict[str, Any]] = []
        self.left_out = 0
        self._until = time.perf_counter() + seconds

    def time(self, case: str, variant: str, calls: Sequence[Callable[[], object]], **facts: Any) -> float:
        """Median time in us, or infinity where it failed or there was no time."""
        if time.perf_counter() > self._until:
            self.left_out += 1
            return float("inf")
        try:
            if self._warm:
                calls[0]()
                return 0.0
            spent = microseconds(calls)
        except Exception as error:
            torch.cuda.synchronize()
            self.rows.append({"case": case, "variant": variant, "error": f"{error}".splitlines()[0][:200], **facts})
            print(f"{case:34s} {variant:46s} FAILED {error!s:.100s}", flush=True)
            return float("inf")
        self.rows.append({"case": case, "variant": variant, "us": round(spent, 2), **facts})
        return spent

    def compare(self, case: str, variants: dict[str, Sequence[Callable[[], object]]], floor: float = 0.0) -> None:
        """Time all and print the best three; `floor`: us that the bytes alone would take."""
        times = {name: self.time(case, name, calls, floor_us=round(floor, 2)) for name, calls in variants.items()}
        if self._warm:
            return
        known = {name: spent for name, spent in times.items() if spent != float("inf")}
        peers = ("torch", "default")
        best = sorted(known, key=lambda name: known[name])[:3]
        shown = [*(name for name in peers if name in known), *(name for name in best if name not in peers)]
        seen = " | ".join(f"{name} {known[name]:.1f}" for name in shown)
        print(f"{case:34s} floor {floor:7.1f} | {seen}", flush=True)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=BF16).div_(shape[-1] ** 0.5)


ROW_GRID = [Product(Way.ROW, n, 1, k, warps) for n, k, warps in
            ((1, 1024, 8), (1, 512, 4), (1, 256, 2), (2, 512, 8), (2, 512, 4), (4, 256, 4), (1, 1024, 4))]


def _tile_grid(width: int, inputs: int) -> Iterator[Product]:
    for height, columns, warps, stages in ((64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 4, 4), (16, 256, 4, 3),
                                           (128, 64, 4, 4)):
        yield Product(Way.TILES, height, width, columns, warps, stages)
    if inputs >= 4096:
        yield Product(Way.TILES, 64, width, 128, 4, 4, inputs // 4, True)
        yield Product(Way.TILES, 64, width, 128, 4, 4, 1024, True)


def _label(how: Product) -> str:
    pieces = f" pieces of {how.piece}" + (" apart" if how.apart else "") if how.piece else ""
    return f"{how.way.value} {how.block_m}x{how.block_n}x{how.block_k} w{how.warps} s{how.stages}{pieces}"


def products(bench: Bench, shape: Shape, rows: Sequence[int]) -> None:
    device = bench.device
    arrived = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    for name, size, inputs, gated in shape.products():
        high = 2 * size if gated else size
        weights = [_random(device, high, inputs) for _ in range(copies(high * inputs * 2))]
        norm = Norm(_random(device, inputs), 1e-5)
        floor = high * inputs * 2 / 4.27e6
        for count in rows:
            x = _random(device, count, inputs)

            def calls(how: Product, x: Tensor = x, norm: Norm | None = None, weights: list[Tensor] = weights,
                      gated: bool = gated) -> list[Callable[[], object]]:
                return [lambda w=w: product(x, w, None, how, arrived, gated=gated, norm=norm)  # type: ignore[misc]
                        for w in weights]

            torch_calls: list[Callable[[], object]] = [
                lambda w=w, x=x: F.linear(x, w) for w in weights]  # type: ignore[misc]
            variants: dict[str, Sequence[Callable[[], object]]] = {"torch": torch_calls}
            chosen = choose(count, size, inputs, BF16, False, gated)
            if chosen.way is not Way.VENDOR:
                variants["default"] = calls(chosen)
            exact = choose(count, size, inputs, BF16, True, gated)
            variants["deterministic " + _label(exact)] = calls(exact)
            if count == 1:
                variants |= {_label(how): calls(how) for how in ROW_GRID}
                variants["default, norm fused"] = calls(chosen, norm=norm)
            elif count <= 64 or name == "gate_up":
                width = max(16, 1 << (count - 1).bit_length())
                variants |= {_label(how): calls(how) for how in _tile_grid(width, inputs)}
            bench.compare(f"{shape.name} {name} {size}x{inputs} rows {count}", variants, floor)
        del weights


def between(bench: Bench, shape: Shape, rows: Sequence[int]) -> None:
    """What lies between the products, against the same in torch."""
    device, heads = bench.device, shape.heads
    kernels = load(False, device)
    for count in rows:
        x, weight = _random(device, count, shape.hidden), _random(device, shape.hidden)
        gate_up = _random(device, count, 2 * shape.inner)
        bench.compare(f"{shape.name} rms_norm rows {count}", {
            "torch": [lambda x=x, w=weight: F.rms_norm(x, (x.shape[1],), w, 1e-5)],  # type: ignore[misc]
            "default": [lambda x=x, w=weight: kernels.rms_norm(x, w, 1e-5)]})  # type: ignore[misc]
        bench.compare(f"{shape.name} silu_mul rows {count}", {
            "torch": [lambda g=gate_up: F.silu(g[:, :g.shape[1] // 2]) * g[:, g.shape[1] // 2:]],  # type: ignore[misc]
            "default": [lambda g=gate_up: kernels.silu_mul(g)]})  # type: ignore[misc]
        wide = heads.query + 2 * heads.keys
        qkv = _random(device, count, wide * heads.dim)
        cos = torch.rand(count, 1, heads.dim, device=device)
        cache = KVCache(*(torch.zeros(4096, heads.keys, heads.dim, dtype=BF16, device=device) for _ in range(2)))
        slots = torch.randperm(4096, device=device)[:count]
        bench.compare(f"{shape.name} rotate_and_store rows {count}", {
            "default": [lambda q=qkv, c=cos, s=slots, k=cache: kernels.rotate_and_store(  # type: ignore[misc]
                q, heads, c, c, k, s)]})
        if count == 1:
            matrix = _random(device, wide * heads.dim, shape.hidden)
            norm = Norm(weight, 1e-5)
            bench.compare(f"{shape.name} project rows 1 (warm)", {
                "default": [lambda x=x, m=matrix, n=norm, c=cos, s=slots, k=cache: kernels.project(  # type: ignore[misc]
                    x, n, m, None, heads, c, c, k, s)]})


def _attention_calls(bench: Bench, shape: Shape, batch: int, context: int, count: int, tuning: Tuning,
                     deterministic: bool, arrived: Tensor, caches: list[tuple[Tensor, Tensor]],
                     parents: list[int] | None = None) -> list[Callable[[], object]]:
    """One call a cache, all after one planning, which is part of the first call as it is of a model's first layer."""
    heads = shape.heads
    layout = decode_step(bench.device, batch, context, count, parents)
    layout.device = device_rows(layout, shape_of(layout, tuning, heads.query // heads.keys), bench.device)
    q = torch.randn(batch * count, heads.query, heads.dim, device=bench.device, dtype=BF16)
    view = layout.views[0]

    def call(index: int) -> object:
        if index == 0:
            view.scratch.clear()
        return attend(q, *caches[index], layout, view, heads.dim ** -0.5, None, tuning, deterministic, arrived)

    return [lambda index=index: call(index) for index in range(len(caches))]  # type: ignore[misc]


def attention(bench: Bench, shape: Shape) -> None:
    device, heads = bench.device, shape.heads
    arrived = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    fast, exact = (load(mode, device).tuning(BF16, heads.dim) for mode in (False, True))
    grid = {"default": fast, "blocks of 32": replace(fast, block_n=32),
            "blocks of 128": replace(fast, block_n=128), "spans of 64": replace(fast, split=64),
            "spans of 256": replace(fast, split=256)}
    for items, warps, stages, height in ((2, 2, 5, 64), (2, 4, 6, 64), (4, 2, 3, 64), (4, 2, 6, 64), (4, 4, 3, 64),
                                         (4, 4, 5, 64), (8, 2, 4, 64), (1, 4, 5, 64), (2, 4, 5, 64), (2, 4, 3, 32),
                                         (2, 4, 5, 32), (2, 4, 3, 16), (2, 4, 5, 16)):
        ways = (KeySplit(math.inf, items, warps, stages, height),)
        grid[f"{items} items, {warps} warps, {stages} stages, {height} high"] = replace(fast, shared=ways, single=ways)
    tree = [-1, *(i // 2 for i in range(63))]
    for batch, context, count, parents in (
            (1, 512, 1, None), (1, 4096, 1, None), (8, 512, 1, None), (8, 4096, 1, None), (32, 512, 1, None),
            (32, 4096, 1, None), (128, 512, 1, None), (128, 4096, 1, None), (256, 700, 1, None), (1, 512, 8, None),
            (1, 512, 64, None),
            (1, 4096, 64, None), (8, 512, 8, None), (1, 512, 64, tree)):
        slots = (batch * -(-(context + count) // 16) + 1) * 16
        size = slots * heads.keys * heads.dim * 2
        caches = [(torch.randn(slots, heads.keys, heads.dim, device=device, dtype=BF16),
                   torch.randn(slots, heads.keys, heads.dim, device=device, dtype=BF16))
                  for _ in range(min(32, copies(2 * size)))]
        variants: dict[str, Sequence[Callable[[], object]]] = {
            name: _attention_calls(bench, shape, batch, context, count, tuning, False, arrived, caches, parents)
            for name, tuning in grid.items() if count == 1 or "blocks" not in name}
        variants["deterministic"] = _attention_calls(bench, shape, batch, context, count, exact, True, arrived, caches,
                                                     parents)
        variants["deterministic, spans of 512"] = _attention_calls(
            bench, shape, batch, context, count, replace(exact, split=512), True, arrived, caches, parents)
        if count == 1:
            q = torch.randn(batch, heads.query, 1, heads.dim, device=device, dtype=BF16)
            keys = [[cache[16:16 + batch * context].view(batch, context, heads.keys, heads.dim).transpose(1, 2)
                     for cache in pair] for pair in caches]
            variants["torch"] = [
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # type: ignore[misc]
                for k, v in keys]
        kind = "decode" if count == 1 else "tree" if parents else "verify"
        bench.compare(f"{shape.name} {kind} {batch} x {count} after {context}", variants, 2 * size / 4.27e6)
        del caches


def prefill(bench: Bench, shape: Shape, rows: int = 2048, prompts: int = 4) -> None:
    """One prompt of so many rows, and several that have as many together."""
    device, heads = bench.device, shape.heads
    arrived = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    fast, exact = (load(mode, device).tuning(BF16, heads.dim) for mode in (False, True))
    caches = [(torch.randn(rows + 32, heads.keys, heads.dim, device=device, dtype=BF16),
               torch.randn(rows + 32, heads.keys, heads.dim, device=device, dtype=BF16)) for _ in range(4)]
    grid = {"default": fast, "3 stages": replace(fast, chunk_stages=3), "5 stages": replace(fast, chunk_stages=5),
            "4 stages": replace(fast, chunk_stages=4), "8 warps": replace(fast, chunk_warps=8)}
    grid |= {f"{high} high, blocks of {keys}": replace(fast, chunk_m=high, chunk_n=keys)
             for high in (64, 128) for keys in (32, 64, 128)}
    for batch in (1, prompts):
        variants: dict[str, Sequence[Callable[[], object]]] = {
            name: _attention_calls(bench, shape, batch, 0, rows // batch, tuning, False, arrived, caches)
            for name, tuning in grid.items()}
        variants["deterministic"] = _attention_calls(bench, shape, batch, 0, rows // batch, exact, True, arrived,
                                                     caches)
        q, k, v = (torch.randn(batch, n, rows // batch, heads.dim, device=device, dtype=BF16)
                   for n in (heads.query, heads.keys, heads.keys))
        variants["torch"] = [lambda q=q, k=k, v=v: F.scaled_dot_product_attention(  # type: ignore[misc]
            q, k, v, is_causal=True, enable_gqa=True)]
        flops = 2 * rows * (rows // batch) * heads.query * heads.dim
        bench.compare(f"{shape.name} prefill {batch} x {rows // batch}", variants, flops / 790e6)


def narrow_tiles(device: torch.device) -> float:
    """Share of the outputs that differ between tiles of 16 and of 64 weight rows. Nobody promises none (it is another
    instruction); where there are none the deterministic mode could use the small ones."""
    x, weight = _random(device, 16, 4096), _random(device, 1024, 4096)
    arrived = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    wide, narrow = (product(x, weight, None, Product(Way.TILES, height, 16, 128, 4, 3, 1024), arrived,
                            dtype=torch.float32) for height in (64, 16))
    return float((wide != narrow).double().mean())


PARTS: dict[str, Callable[[Bench, Shape], None]] = {
    "attention": attention, "prefill": prefill,
    "between": lambda bench, shape: between(bench, shape, (1, 8, 128, 2048)),
    "products": lambda bench, shape: products(bench, shape, (1, 2, 4, 8, 16, 32, 64, 128))}


def warm(only: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Processes that compile each part's kernels into Triton's cache, side by side."""
    return [subprocess.Popen([sys.executable, __file__, "--warm", shape.name, "--only", part],
                             stdout=subprocess.DEVNULL)
            for shape in SHAPES for part in only]


@torch.inference_mode()
def run(seconds: float, only: Sequence[str], shapes: Sequence[Shape] = SHAPES, warming: bool = False) -> dict[str, Any]:
    device = torch.device("cuda")
    results: dict[str, Any] = {"machine": {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}}
    began = time.perf_counter()
    helpers = [] if warming else warm(only)
    for helper in helpers:
        helper.wait()
    print(f"compilation took {time.perf_counter() - began:.0f} s", flush=True)
    if not warming:
        results["narrow_tiles_differ"] = narrow_tiles(device)
        print(f"tiles of 16 weight rows: {results['narrow_tiles_differ']:.1%} of the outputs differ from those of 64",
              flush=True)
    bench = Bench(device, seconds, warming)
    for shape in shapes:
        for name in only:
            start = time.perf_counter()
            PARTS[name](bench, shape)
            print(f"-- {shape.name} {name}: {time.perf_counter() - start:.0f} s", flush=True)
    results["rows"] = bench.rows
    results["left_out"] = bench.left_out
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/tune_kernels.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write all times to this file")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit on the timing")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, of " + ",".join(PARTS))
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    only = options.only.split(",")
    if options.warm:
        run(600.0, only, [shape for shape in SHAPES if shape.name == options.warm], warming=True)
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    results = run(options.seconds, only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
