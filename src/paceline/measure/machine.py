"""What this computer is: processor, instruction sets, memory. No torch here; every fact may be unknown."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from paceline.config import available_memory

_TELLING_FLAGS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)
"""Instruction sets that decide which number formats are quick, x86 then Arm."""

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_FP16_FLAGS = frozenset({"avx512_fp16", "asimdhp"})


@dataclass(frozen=True)
class Machine:
    system: str
    architecture: str
    cpu: str
    cores: int
    """Logical processors of the machine."""
    usable_cores: int
    """Those this process may keep busy: affinity and container limits taken into account."""
    instruction_sets: tuple[str, ...]
    memory_total: int | None
    memory_available: int

    @property
    def has_bf16(self) -> bool:
        return not _BF16_FLAGS.isdisjoint(self.instruction_sets)

    @property
    def has_fp16(self) -> bool:
        return not _FP16_FLAGS.isdisjoint(self.instruction_sets)


def inspect_machine() -> Machine:
    info = _cpuinfo(_read("/proc/cpuinfo"))
    flags = set((info.get("flags") or info.get("Features") or "").split())
    cores = os.cpu_count() or 1
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=info.get("model name") or _arm_name(info) or platform.processor() or "unknown",
        cores=cores,
        usable_cores=_usable_cores(cores),
        instruction_sets=tuple(flag for flag in _TELLING_FLAGS if flag in flags),
        memory_total=_memory_total(),
        memory_available=available_memory(),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _cpuinfo(text: str) -> dict[str, str]:
    """The first processor's fields."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            if fields:
                break
            continue
        fields[key.strip()] = value.strip()
    return fields


_ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1", ("0x41", "0xd40"): "Arm Neoverse V1", ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2", ("0x41", "0xd08"): "Arm Cortex-A72", ("0x41", "0xd0b"): "Arm Cortex-A76",
}


def _arm_name(info: dict[str, str]) -> str | None:
    """Arm's /proc/cpuinfo gives numbers instead of a name."""
    maker, part = info.get("CPU implementer"), info.get("CPU part")
    if maker is None or part is None:
        return None
    return _ARM_PARTS.get((maker, part), f"Arm implementer {maker} part {part}")


def _usable_cores(cores: int) -> int:
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = _cgroup_quota(_read("/sys/fs/cgroup/cpu.max"))
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cgroup_quota(cpu_max: str) -> float | None:
    """Cores' worth of time a container may use, from the text of cpu.max ("200000 100000"; "max": no limit)."""
    parts = cpu_max.split()
    if len(parts) != 2 or not parts[0].isdigit() or not parts[1].isdigit() or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _memory_total() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
