"""Whether the Triton kernels are right on this card: against the reference, and bit by bit between widths.

Failures are collected as sentences, never raised: one run should say all that is wrong. Exits with 1 where there are
any. `python tests/gpu/kernel_checks.py` needs torch, triton and numpy alone.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from paceline.bench.report import Row, document, json_argument, say
from paceline.kernels.interface import Kernels
from paceline.kernels.layout import GroupView, Layout
from paceline.kernels.low_rank import NOBODY, LowRank, LowRankSlots, RowSlots
from paceline.kernels.operands import Heads, KVCache, Norm
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.trees import ancestry, depths
from paceline.kernels.triton import load
from verdict import card, conclude

TREE = [-1, 0, 0, 1, 1, 2, 4, 4, 0]
Tensor = torch.Tensor
Caches = tuple[Tensor, Tensor]


@torch.inference_mode()
def run(device: torch.device, only: str = "") -> dict[str, Any]:
    """The document: a row a check, with its seconds and what was seen of a problem. `only`: a part of their names."""
    rows: list[Row] = []
    failures: list[str] = []
    for name, check in _checks(device):
        if only not in name:
            continue
        began = time.perf_counter()
        try:
            problem = check()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0] + " | " + traceback.format_exc()[-400:]
        seconds = time.perf_counter() - began
        rows.append(Row(name, "s", round(seconds, 1), higher_is_better=False, note=problem))
        say(f"{'ok  ' if not problem else 'FAIL'} {name:58s} {seconds:5.1f} s  {problem}")
        if problem:
            failures.append(f"{name}: {problem}")
    say(f"kernel_checks: {len(rows) - len(failures)} of {len(rows)} passed")
    return document(rows) | {"failures": failures}


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], str]]]:
    for dtype in (torch.bfloat16, torch.float32):
        short = str(dtype)[6:]
        for deterministic in (False, True):
            mode = "deterministic" if deterministic else "fast"
            kernels = load(deterministic, device)
            yield f"products {short} {mode}", lambda k=kernels, d=dtype: _products(k, device, d)  # type: ignore[misc]
            yield f"projection {short} {mode}", lambda k=kernels, d=dtype: _project(k, device, d)  # type: ignore[misc]
            yield f"attention {short} {mode}", lambda k=kernels, d=dtype: _attention(k, device, d)  # type: ignore[misc]
        exact = load(True, device)
        yield f"bits of products {short}", lambda k=exact, d=dtype: _product_bits(k, device, d)  # type: ignore[misc]
        yield f"additions {short}", lambda k=exact, d=dtype: _additions(k, device, d)  # type: ignore[misc]
        yield f"bits of attention {short}", lambda k=exact, d=dtype: _attention_bits(k, device, d)  # type: ignore[misc]
    yield "fp8 cache", lambda: _fp8(device)
    yield "bits of attention fp8", lambda: _attention_bits(load(True, device), device, torch.bfloat16, fp8=True)


def _far(got: Tensor, expected: Tensor, dtype: torch.dtype, name: str, limit: float | None = None) -> str:
    # Of the largest value: bfloat16 has 8 bits, float32 sums in another order.
    limit = limit or (2e-2 if dtype == torch.bfloat16 else 1e-5)
    gap = (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9)
    return "" if bool(gap <= limit) else f"{name} off by {float(gap):.2e} of the largest. "


def _random(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Callable[..., Tensor]:
    source = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=source, device=device)
        return (values / shape[-1] ** 0.5 if len(shape) == 2 else values).to(dtype)

    return make


def _products(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    make, reference, problem = _random(device, dtype), ReferenceKernels(), ""
    for inputs, outputs in ((4096, 1024), (576, 960), (1536, 576)):
        weight, norm, bias = make(outputs, inputs), Norm(make(inputs), 1e-5), make(outputs)
        for count in (1, 8, 33, 200):
            x, residual = make(count, inputs) * inputs ** 0.5, make(count, outputs)
            where = f"{outputs}x{inputs} at {count} rows"
            problem += _far(kernels.linear(x, weight, bias), reference.linear(x, weight, bias), dtype, where)
            problem += _far(kernels.linear_add(x, weight, None, residual.clone()),
                            reference.linear_add(x, weight, None, residual), dtype, f"+ residual {where}")
            problem += _far(kernels.gated(x, norm, weight, None), reference.gated(x, norm, weight, None), dtype,
                            f"gated {where}")
            problem += _far(kernels.head(x, norm, weight), reference.head(x, norm, weight), dtype, f"head {where}")
    return problem


def _project(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    make, problem = _random(device, dtype), ""
    heads = Heads(9, 3, 64)
    for shape in (heads, replace(heads, query_norm=Norm(make(64), 1e-5), key_norm=Norm(make(64), 1e-5))):
        weight, norm = make(15 * 64, 576), Norm(make(576), 1e-5)
        for count in (1, 5, 100):
            x = make(count, 576) * 24
            angles = torch.rand(count, 32, device=device) * 6
            cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
            sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
            slots = torch.randperm(200, device=device)[:count]
            caches = [KVCache(*(torch.zeros(200, 3, 64, dtype=dtype, device=device) for _ in range(2)))
                      for _ in range(2)]
            q, expected = (k.project(x, norm, weight, None, shape, cos, sin, cache, slots)
                           for k, cache in zip((kernels, ReferenceKernels()), caches))
            where = f"at {count} rows"
            problem += _far(q, expected, dtype, f"q {where}")
            problem += _far(caches[0].keys, caches[1].keys, dtype, f"k {where}")
            problem += _far(caches[0].values, caches[1].values, dtype, f"v {where}")
    return problem


def make_step(groups: list[tuple[int, int, list[int] | None]], device: torch.device, dtype: torch.dtype, *,
              heads: int = 32, kv_heads: int = 8, dim: int = 128, window: int | None = None,
              seed: int = 0) -> tuple[Layout, Tensor, Caches]:
    """Groups (start, rows, parents) in shuffled blocks, caches full of NaN elsewhere. What a group holds depends on
    itself alone, not on the others or on `seed`, which only places it."""
    needed = [-(-(start + count) // 16) for start, count, _ in groups]
    free = list(range(1, sum(needed) + 9))
    random.Random(seed).shuffle(free)
    keys, values = (torch.full(((sum(needed) + 9) * 16, kv_heads, dim), torch.nan, dtype=dtype, device=device)
                    for _ in range(2))
    tables = torch.zeros(len(groups), max(needed) + 1, dtype=torch.int32)
    offsets, positions, slots, queries = [0], [], [], []
    for index, (start, count, parents) in enumerate(groups):
        tables[index, :needed[index]] = torch.tensor([free.pop() for _ in range(needed[index])])
        make = _random(device, dtype, start)
        physical = torch.arange(start + count)
        where = tables[index, physical // 16].long() * 16 + physical % 16
        for cache in (keys, values):
            cache[where.to(device)] = make(start + count, kv_heads, dim)
        queries.append(make(start + count, heads, dim)[start:])
        slots.append(where[start:])
        positions += [start + d for d in (range(count) if parents is None else depths(parents))]
        offsets.append(offsets[-1] + count)
    view = GroupView(tables.to(device), torch.cat(slots).to(device), window)
    layout = Layout(torch.tensor(positions, device=device), offsets, [group[0] for group in groups],
                    [group[2] for group in groups], 16, [view])
    return layout, torch.cat(queries), (keys, values)


MIXED: list[tuple[int, int, list[int] | None]] = [
    (13, 9, TREE), (0, 20, None), (500, 1, None), (1000, 5, None), (777, 9, TREE), (40, 300, None), (3000, 1, None)]


def _attend(kernels: Kernels, step: tuple[Layout, Tensor, Caches], fp8: bool = False) -> Tensor:
    """`fp8`: over the codes of what the caches hold."""
    layout, q, caches = step
    (keys, values), scales = _codes(kernels, caches) if fp8 else (caches, None)
    return kernels.attend(q, keys, values, layout, layout.views[0], q.shape[2] ** -0.5, scales)


def _codes(kernels: Kernels, caches: Caches) -> tuple[Caches, Caches]:
    """Caches in 8 bits and their scales, stored by the kernels; zeros where nothing is held."""
    keys, values = caches
    codes = [torch.zeros_like(cache, dtype=torch.float8_e4m3fn) for cache in caches]
    scales = [torch.zeros(cache.shape[:2], device=cache.device) for cache in caches]
    slots = torch.arange(len(keys), device=keys.device).where(_held(keys), -1)
    kernels.store(codes[0], codes[1], slots, keys, values, (scales[0], scales[1]))
    return (codes[0], codes[1]), (scales[0], scales[1])


def _held(cache: Tensor) -> Tensor:
    return ~cache.isnan().flatten(1).any(1)


def _attention(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    problem = ""
    for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64)):
        for window in (None, 100):
            step = make_step(MIXED, device, dtype, heads=heads, kv_heads=kv_heads, dim=dim, window=window)
            got = _attend(kernels, step)
            view = step[0].views[0]
            step[0].views[0] = GroupView(view.tables.long(), view.slots, window)
            step[2][0].nan_to_num_(0.0), step[2][1].nan_to_num_(0.0)
            problem += _far(got, _attend(ReferenceKernels(), step), dtype, f"{heads}/{kv_heads} x {dim}, {window}")
    return problem


WIDTHS = ((0, 1), (1, 3), (5, 13), (3, 19), (100, 133), (0, 64), (0, 65), (0, 128), (0, 256), (299, 300))


def _product_bits(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """Of every product alone and among 384 rows, of even and of wild values."""
    make, problem = _random(device, dtype), ""
    for inputs, outputs in ((4096, 1024), (14336, 256), (576, 960), (1536, 576), (4096, 6144), (1152, 320)):
        weight, norm, bias = make(outputs, inputs), Norm(make(inputs), 1e-5), make(outputs)
        for wild in (0, 8):
            x = (make(384, inputs) * torch.exp2(torch.randint(-wild, wild + 1, (384, inputs), device=device))).to(dtype)
            residual = make(384, outputs)
            whole = _products_of(kernels, x, residual, weight, norm, bias)
            # What rows beside some with an adapter get in place of the fused product.
            if not torch.equal(kernels.gate(kernels.gate_up(kernels.norm(x, norm), weight), "silu"), whole["gated"]):
                problem += f"gated {outputs}x{inputs} is not its product and a gate. "
            for first, last in WIDTHS:
                part = _products_of(kernels, x[first:last], residual[first:last], weight, norm, bias)
                problem += "".join(f"{name} {outputs}x{inputs} differs at {last - first} rows. " for name in whole
                                   if not torch.equal(part[name], whole[name][first:last]))
    return problem + _project_bits(kernels, device, dtype)


def _products_of(kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, norm: Norm,
                 bias: Tensor) -> dict[str, Tensor]:
    x = x.clone()
    return {"linear": kernels.linear(x, weight), "biased": kernels.linear(x, weight, bias),
            "linear_add": kernels.linear_add(x, weight, None, residual.clone()),
            "linear_add, biased": kernels.linear_add(x, weight, bias, residual.clone()),
            "gated": kernels.gated(x, norm, weight, None), "gated, biased": kernels.gated(x, norm, weight, bias),
            "head": kernels.head(x, norm, weight)}


def _additions(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """Low-rank ones to rows of any slots: near the reference's, and the same bits at any width."""
    make, reference, problem = _random(device, dtype), ReferenceKernels(), ""
    for inputs, outputs in ((4096, 1024), (14336, 256), (576, 960), (1152, 320)):
        low = LowRankSlots.like(LowRank(make(16, inputs), make(outputs, 16)), 4, 64)
        for slot, rank in ((0, 16), (1, 64), (3, 48)):
            low.set(slot, LowRank(make(rank, inputs), make(outputs, rank)))
        x, out = make(384, inputs) * inputs ** 0.5, make(384, outputs)
        slots = torch.randint(NOBODY, 4, (384,), device=device)
        whole = kernels.add_low_rank(out.clone(), x, low, RowSlots(slots))
        where = f"{outputs}x{inputs}"
        problem += _far(whole, reference.add_low_rank(out.clone(), x, low, RowSlots(slots)), dtype, where)
        if not torch.equal(whole[slots < 0], out[slots < 0]):
            problem += f"{where} changes rows without a slot. "
        for first, last in WIDTHS:
            part = kernels.add_low_rank(out[first:last].clone(), x[first:last].clone(), low,
                                        RowSlots(slots[first:last].clone()))
            if not torch.equal(part, whole[first:last]):
                problem += f"{where} differs at {last - first} rows. "
    return problem


def _project_bits(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    make, problem = _random(device, dtype), ""
    for heads, inputs in ((Heads(9, 3, 64), 576), (Heads(32, 8, 128), 4096)):
        wide = (heads.query + 2 * heads.keys) * heads.dim
        weight, norm, x = make(wide, inputs), Norm(make(inputs), 1e-5), make(384, inputs) * inputs ** 0.5
        angles = torch.rand(384, heads.dim // 2, device=device) * 6
        whole = _projected(kernels, x, norm, weight, heads, angles)
        for first, last in WIDTHS:
            part = _projected(kernels, x[first:last].clone(), norm, weight, heads, angles[first:last])
            if not all(torch.equal(a, b[first:last]) for a, b in zip(part, whole)):
                problem += f"projection of {inputs} differs at {last - first} rows. "
    return problem


def _projected(kernels: Kernels, x: Tensor, norm: Norm, weight: Tensor, heads: Heads,
               angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    cache = KVCache(*(torch.zeros(len(x), heads.keys, heads.dim, dtype=x.dtype, device=x.device) for _ in range(2)))
    q = kernels.project(x, norm, weight, None, heads, cos, sin, cache, torch.arange(len(x), device=x.device))
    return q, cache.keys, cache.values


def _attention_bits(kernels: Kernels, device: torch.device, dtype: torch.dtype, fp8: bool = False) -> str:
    problem = ""
    crowd = [*MIXED, *((90 + 37 * i % 900, 1, None) for i in range(150))]  # so many that texts are one item each
    for heads, kv_heads, dim, window in ((32, 8, 128, None), (9, 3, 64, None), (9, 3, 64, 100)):
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "window": window}
        for company in (MIXED, crowd, crowd[len(MIXED):]):
            together = _attend(kernels, make_step(company, device, dtype, **shape), fp8)
            offset = 0
            for index, group in enumerate(company[:12]):
                alone = _attend(kernels, make_step([group], device, dtype, seed=index + 1, **shape), fp8)
                if not torch.equal(alone, together[offset:offset + group[1]]):
                    problem += f"group {index} {group[:2]} among {len(company)} of {heads}/{kv_heads} differs. "
                offset += group[1]
    whole, q, caches = make_step([(0, 600, None)], device, dtype)
    all_rows = _attend(kernels, (whole, q, caches), fp8)
    for count in (1, 2, 17, 64, 129, 300):
        view = whole.views[0]
        part = Layout(whole.positions[-count:], [0, count], [600 - count], [None], 16,
                      [GroupView(view.tables, view.slots[-count:])])
        if not torch.equal(_attend(kernels, (part, q[-count:], caches), fp8), all_rows[-count:]):
            problem += f"a prompt's last {count} rows differ. "
    return problem + _tree_bits(kernels, device, dtype, fp8)


def _tree_bits(kernels: Kernels, device: torch.device, dtype: torch.dtype, fp8: bool) -> str:
    """Each path of a tree once more as a chain, its keys copied to the chain's slots."""
    for start in (250, 61):
        tree, q, (keys, values) = make_step([(start, len(TREE), TREE)], device, dtype)
        got = _attend(kernels, (tree, q, (keys, values)), fp8)
        slots = tree.views[0].slots
        for row, path in enumerate(ancestry(TREE)):
            mine = [cache.clone() for cache in (keys, values)]
            for cache, source in zip(mine, (keys, values)):
                cache[slots[:len(path)]] = source[slots[path]]
            chain = Layout(start + torch.arange(len(path), device=device), [0, len(path)], [start], [None], 16,
                           [GroupView(tree.views[0].tables, slots[:len(path)])])
            if not torch.equal(_attend(kernels, (chain, q[path], (mine[0], mine[1])), fp8)[-1], got[row]):
                return f"tree row {row} after {start} differs from its chain. "
    return ""


def _fp8(device: torch.device) -> str:
    layout, q, caches = make_step(MIXED, device, torch.bfloat16)
    view, problem, kernels, there = layout.views[0], "", load(False, device), _held(caches[0])
    codes, scales = _codes(kernels, caches)
    for cache, code, scale in zip(caches, codes, scales):
        problem += _far((code.float() * scale[..., None])[there], cache[there], torch.bfloat16, "codes", limit=0.04)
    got = kernels.attend(q, *codes, layout, view, 128 ** -0.5, scales)
    layout.views[0] = GroupView(view.tables.long(), view.slots)
    expected = ReferenceKernels().attend(q, *codes, layout, layout.views[0], 128 ** -0.5, scales)
    return problem + _far(got, expected, torch.bfloat16, "attention")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/gpu/kernel_checks.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name has this in it")
    json_argument(parser)
    given = parser.parse_args()
    conclude(lambda: run(card(), given.only), given.json)


if __name__ == "__main__":
    main()
