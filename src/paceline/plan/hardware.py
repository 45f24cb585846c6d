"""What a model runs on: memory, bandwidth, arithmetic, links and price of known cards and CPUs, and of one's own."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.models.fields import finite, shown

GB = 10**9
STARTS, DRAFTED = 30e-6, 12.5e-6
"""Of a card, seconds a layer: layer_s and drafted_s, as Paceline's own steps have them on an H200."""
_COUNTED = re.compile(r"(.+?)x(\d+)")
MOST_CARDS = 4096
_WIDER = {"float32": (), "bfloat16": ("float16", "float32"), "float16": ("bfloat16", "float32"),
          "fp8": ("bfloat16", "float16", "float32"), "int8": ("bfloat16", "float16", "float32")}
"""What a format is computed in where there are no instructions for it."""
BLOCKS = 0.69
"""Of a CPU's arithmetic in int8: what its products reach on 4-bit blocks, which they unpack first (38 billion
multiply-adds a second instead of 55, docs/notebook.md)."""


@dataclass(frozen=True)
class Hardware:
    """One card or CPU, `count` of which share a model (tensor parallel). Figures of data sheets, dense arithmetic;
    `sustained` has what programs see of them."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second."""
    flops: Mapping[str, float]
    """A second, by format."""
    link: float = 0.0
    """Bytes a second that one sends to the others."""
    price: float | None = None
    """Dollars an hour, roughly: what clouds ask on demand."""
    kind: str = "card"
    """card, cpu or other: something that Paceline does not run on."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    count: int = 1
    overlap: float = 1.0
    """How much of the shorter of reading and computing goes on during the longer: 1 all, so that the longer alone
    counts, 0 nothing, so that their sum does."""
    layer_s: float = 0.0
    """Seconds that starting a layer's kernels takes beyond their work."""
    drafted_s: float | None = None
    """Drafts come on top of a plain step, whatever that computes while it reads: so many seconds a layer, and their
    rows' arithmetic. None: a step with drafts is one of more rows."""
    reads: float = 0.90
    """Share of the bandwidth that is attained."""
    computes: float = 0.65
    """Share of the arithmetic that is attained."""
    calibrated: bool = field(default=False, compare=False)
    """bandwidth and flops were measured with this model."""

    @property
    def label(self) -> str:
        return self.name if self.count == 1 else f"{self.name}x{self.count}"

    def arithmetic(self, dtype: str) -> float:
        """FLOP/s of one, with weights of this format; those of fewer bits are widened before they are computed with: on
        a card to floats, by the native code of CPUs to int8."""
        if self.kind == "cpu" and dtype == "int4" and "int8" in self.flops:
            return BLOCKS * self.flops["int8"]
        usual = dtype if dtype in _WIDER else "bfloat16"
        found = next((self.flops[one] for one in (usual, *_WIDER[usual]) if one in self.flops), None)
        if found is None:
            raise ConfigError(f"{self.name} has no figure for {dtype}: give flops for {', '.join(_WIDER)}.")
        return found

    def ridge(self, dtype: str) -> float:
        """FLOP/byte above which arithmetic takes longer than reading."""
        return self.arithmetic(dtype) / self.bandwidth

    def sustained(self) -> Hardware:
        """As programs see it: shares of the figures, and on a card a start for every layer; a CPU is not taken to read
        while it computes. The constants are those that Paceline's own steps have on an H200 (docs/plan.md)."""
        if self.calibrated:
            return self
        card = self.kind == "card"
        return replace(self, bandwidth=self.bandwidth * self.reads, overlap=float(card),
                       flops={dtype: rate * self.computes for dtype, rate in self.flops.items()},
                       layer_s=STARTS if card else 0.0, drafted_s=DRAFTED if card else None)


def _card(name: str, memory: float, bandwidth: float, bf16: float, price: float | None, *, eight: float = 0.0,
          fp8: bool = False, link: float = 64.0, single: float = 0.0, kind: str = "card",
          capability: tuple[int, int] | None = None, half: str = "bfloat16") -> Hardware:
    """memory in GB, bandwidth and link in GB/s, arithmetic in TFLOP/s."""
    flops = {half: bf16, "float16": bf16, "float32": single or bf16 / 16} | (
        {"int8": eight} if eight else {}) | ({"fp8": eight} if fp8 else {})
    return Hardware(name, memory * GB, bandwidth * GB, {dtype: rate * 1e12 for dtype, rate in flops.items()},
                    link * GB, price, kind, capability)


def _cpu(name: str, bandwidth: float, single: float, bf16: float = 0.0, int8: float = 0.0, memory: float = 64,
         price: float | None = None, reads: float = 0.8, computes: float = 0.5) -> Hardware:
    flops = {"float32": single} | ({"bfloat16": bf16} if bf16 else {}) | ({"int8": int8} if int8 else {})
    return Hardware(name, memory * GB, bandwidth * GB, {dtype: rate * 1e12 for dtype, rate in flops.items()},
                    price=price, kind="cpu", reads=reads, computes=computes)


_ALL = (
    _card("b300", 288, 8000, 2250, 7.0, eight=4500, fp8=True, link=900, single=75, capability=(10, 3)),
    _card("b200", 180, 8000, 2250, 5.5, eight=4500, fp8=True, link=900, single=75, capability=(10, 0)),
    _card("h200", 141, 4800, 989, 3.8, eight=1979, fp8=True, link=450, single=67, capability=(9, 0)),
    _card("h100", 80, 3350, 989, 3.0, eight=1979, fp8=True, link=450, single=67, capability=(9, 0)),
    _card("h100-pcie", 80, 2000, 756, 2.5, eight=1513, fp8=True, link=64, single=51, capability=(9, 0)),
    _card("a100", 80, 2039, 312, 1.8, eight=624, link=300, single=19.5, capability=(8, 0)),
    _card("a100-40gb", 40, 1555, 312, 1.3, eight=624, link=300, single=19.5, capability=(8, 0)),
    _card("l40s", 48, 864, 362, 1.0, eight=733, fp8=True, single=91.6, capability=(8, 9)),
    _card("l4", 24, 300, 121, 0.7, eight=242, fp8=True, single=30, capability=(8, 9)),
    _card("a10", 24, 600, 125, 0.75, eight=250, single=31, capability=(8, 6)),
    _card("rtx-6000-ada", 48, 960, 364, 0.8, eight=728, fp8=True, single=91, capability=(8, 9)),
    _card("rtx-5090", 32, 1792, 210, 0.7, eight=419, fp8=True, single=105, capability=(12, 0)),
    _card("rtx-4090", 24, 1008, 165, 0.4, eight=330, fp8=True, single=82.6, capability=(8, 9)),
    _card("rtx-3090", 24, 936, 71, 0.25, eight=142, single=35.6, capability=(8, 6)),
    _card("t4", 16, 320, 65, 0.35, eight=130, single=8.1, capability=(7, 5), half="float16"),
    _card("v100", 32, 900, 125, 0.8, link=150, single=15.7, capability=(7, 0), half="float16"),
    _card("mi300x", 192, 5300, 1307, 2.5, eight=2614, fp8=True, link=448, single=163, kind="other"),
    _card("mi325x", 256, 6000, 1307, 3.0, eight=2614, fp8=True, link=448, single=163, kind="other"),
    _card("gaudi-3", 128, 3700, 1835, None, eight=1835, fp8=True, link=600, kind="other"),
    _card("tpu-v5e", 16, 819, 197, 1.2, eight=394, link=200, kind="other"),
    _card("tpu-v5p", 95, 2765, 459, 4.2, eight=918, link=600, kind="other"),
    _card("tpu-v6e", 32, 1640, 918, 2.7, eight=1836, link=400, kind="other"),
    _card("m2-ultra", 192, 800, 54, None, single=27, kind="other"),
    _card("m4-max", 128, 546, 34, None, single=17, kind="other"),
    _cpu("xeon-8480", 307, 7.2, 115, 230, memory=512, price=3.0),
    _cpu("epyc-9654", 461, 9.8, 19, 39, memory=768, price=4.0),
    _cpu("graviton4", 537, 8.6, 17, 34, memory=768, price=4.3),
    _cpu("graviton3", 307, 5.3, 10, 21, memory=128, price=2.3),
    _cpu("ryzen-7950x", 83, 2.3, 4.6, 9.2),
    _cpu("core-i9-14900k", 90, 1.6, 0, 6.4),
    # Its memory was read with 38 GB/s, by products with 33; a core can do 80 billion multiply-adds in int8 a second,
    # and does 50 in a step (docs/notebook.md).
    _cpu("neoverse-n1-2cores", 38, 0.08, 0, 0.32, memory=16, price=0.08, reads=33 / 38, computes=50 / 80),
)
KNOWN: Mapping[str, Hardware] = {one.name: one for one in _ALL}


def find_hardware(text: str) -> Hardware:
    """A known name, with a number behind it for several that share a model (h100x8), or a .json file (from_dict)."""
    if text.endswith(".json"):
        return from_file(Path(text))
    name = text.strip().lower().replace("_", "-").replace(" ", "-")
    counted = _COUNTED.fullmatch(name)
    if name in KNOWN:
        return KNOWN[name]
    if counted and counted[1] in KNOWN:
        return times(KNOWN[counted[1]], int(counted[2]))
    near = difflib.get_close_matches(counted[1] if counted else name, KNOWN, 3, 0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(KNOWN)}."
    raise ConfigError(f"There is no card or CPU {text!r} (a number behind an x is how many, as in h100x8): {hint} "
                      "Others can be described in a .json file with memory_gb, bandwidth_gb_s and tflops.")


def times(one: Hardware, count: int) -> Hardware:
    if not 1 <= count <= MOST_CARDS:
        raise ConfigError(f"--hardware: from 1 to {MOST_CARDS} of {one.name} can share a model, not {count}.")
    return replace(one, count=count)


def from_file(path: Path) -> Hardware:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON ({error}): write an object with memory_gb, bandwidth_gb_s "
                          "and tflops.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold one object with memory_gb, bandwidth_gb_s and tflops.")
    return from_dict({"name": path.stem} | raw, str(path))


def from_dict(raw: Mapping[str, Any], where: str = "hardware") -> Hardware:
    """memory_gb, bandwidth_gb_s and tflops ({format: number}) are needed; link_gb_s, price, kind and count may be
    there."""
    known = {"name", "memory_gb", "bandwidth_gb_s", "tflops", "link_gb_s", "price", "kind", "count"}
    if unknown := sorted(set(raw) - known):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}.")
    tflops = raw.get("tflops")
    if not isinstance(tflops, Mapping) or not tflops or not set(tflops) <= set(_WIDER):
        raise ConfigError(f"{where}: tflops must map formats ({', '.join(_WIDER)}) to numbers, got {shown(tflops)}.")
    kind, count = raw.get("kind", "card"), raw.get("count", 1)
    if kind not in ("card", "cpu", "other"):
        raise ConfigError(f"{where}: kind must be card, cpu or other, got {shown(kind)}.")
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigError(f"{where}: count must be a whole number, got {shown(count)}.")
    price = raw.get("price")
    one = Hardware(str(raw.get("name", "mine")), _positive(raw.get("memory_gb"), f"{where}: memory_gb") * GB,
                   _positive(raw.get("bandwidth_gb_s"), f"{where}: bandwidth_gb_s") * GB,
                   {dtype: _positive(rate, f"{where}: tflops of {dtype}") * 1e12 for dtype, rate in tflops.items()},
                   _positive(raw.get("link_gb_s", 64), f"{where}: link_gb_s") * GB,
                   None if price is None else _positive(price, f"{where}: price"), kind)
    return times(one, count)


def _positive(value: Any, name: str) -> float:
    found = finite(value)
    if found is None or found <= 0:
        raise ConfigError(f"{name} must be a number above 0, got {shown(value)}.")
    return found
