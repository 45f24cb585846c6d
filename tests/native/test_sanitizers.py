"""The native code under AddressSanitizer and UBSan: random shapes, buffers of the exact size, 1 to 3 threads.
`make sanitize`; CI runs it when what it covers has changed."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels import cpu

native = cpu.load()
pytestmark = pytest.mark.sanitize

NATIVE = Path(__file__).parents[2] / "native"
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SOURCES = [NATIVE / f"{part}.cpp" for part in ("decoder", "attention", "blocks", "memory", "packing", "pool",
                                               "dispatch", "sampler", "suffix_tree", "drawn", "markov", "tests/fuzz",
                                               "tests/fuzz_sampler", "tests/fuzz_suffix", "tests/fuzz_markov")]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
ISAS = {"aarch64": {"neon": ["-march=armv8.2-a+dotprod+fp16"]},
        "x86_64": {"avx2": AVX2, "avx512vnni": [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"]}}


def compiler() -> str:
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


def test_no_sanitizer_complains(tmp_path: Path) -> None:
    cxx = compiler()
    probe = subprocess.run([cxx, *FLAGS, "-x", "c++", "-", "-o", tmp_path / "probe"], input="int main() {}", text=True,
                           capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("the compiler has no sanitizer runtime")
    tables = ISAS.get(platform.machine(), {})
    objects = []
    for isa, more in {"portable": [], **tables}.items():
        target = tmp_path / f"{isa}.o"
        subprocess.run([cxx, *FLAGS, *more, f"-DPACELINE_ISA={isa}", f"-DPACELINE_TABLE={isa}_kernels", "-c",
                        NATIVE / "kernels_impl.cpp", "-o", target], check=True)
        objects.append(target)
    defines = [f"-DPACELINE_HAS_{name.upper()}" for name in tables]
    program = tmp_path / "fuzz"
    subprocess.run([cxx, *FLAGS, *defines, *SOURCES, *objects, "-pthread", "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "nothing wrong" in run.stdout
    # What is compiled for a better processor than this one is left out.
    assert native is None or f"{len(native.available_kernels())} tables" in run.stdout


OTHER = {"aarch64": ("x86_64", "x86-64", "avx2", "max"), "x86_64": ("aarch64", "aarch64", "neon", "max")}
"""The machine that is emulated on each: its name, Debian's for its compiler, the kernels, the processor."""


def test_the_other_instruction_set_runs_under_emulation(tmp_path: Path) -> None:
    """AVX2 on an Arm machine and NEON on an x86 one, through a cross compiler and qemu-user, where both are
    installed."""
    if platform.machine() not in OTHER:
        pytest.skip("needs an x86 or an Arm machine")
    other, package, isa, processor = OTHER[platform.machine()]
    cxx, qemu = shutil.which(f"{other}-linux-gnu-g++"), shutil.which(f"qemu-{other}")
    if cxx is None or qemu is None:
        pytest.skip(f"needs the packages g++-{package}-linux-gnu and qemu-user")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off"]  # GCC 12 for Arm fails on the fuzz with more
    objects = []
    for name, more in {"portable": [], isa: ISAS[other][isa]}.items():
        objects.append(tmp_path / f"{name}.o")
        subprocess.run([cxx, *flags, *more, f"-DPACELINE_ISA={name}", f"-DPACELINE_TABLE={name}_kernels", "-c",
                        NATIVE / "kernels_impl.cpp", "-o", objects[-1]], check=True)
    program = tmp_path / "fuzz"
    subprocess.run([cxx, *flags, f"-DPACELINE_HAS_{isa.upper()}", *SOURCES, *objects, "-pthread", "-o", program],
                   check=True)
    run = subprocess.run([qemu, "-cpu", processor, "-L", f"/usr/{other}-linux-gnu", program], capture_output=True,
                         text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "2 tables, nothing wrong" in run.stdout
