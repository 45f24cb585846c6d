"""`paceline doctor`: what this machine has, what Paceline can use of it, and what would be slow and why."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.cli.plain import plain
from paceline.cli.terminal import console
from paceline.measure.machine import Machine, inspect_machine

CHECK_FAILED = 1
_GIB = 1 << 30
_TORCH_RANGE = ((2, 11), (2, 13))
"""Versions the tests run on; others may work and are named."""
_OPTIONAL = {
    "jinja2": "chat templates (`paceline chat`, `--chat`)",
    "llguidance": "structured output (schemas, grammars, regular expressions)",
    "fastapi": "server (`paceline serve`)",
    "uvicorn": "server (`paceline serve`)",
    "prometheus_client": "server (`paceline serve`)",
    "transformers": "peer for `paceline bench` to measure beside Paceline",
}


@dataclass
class DoctorReport:
    """Everything doctor found; `as_dict` through `plain` is what --json prints."""

    paceline: str
    python: str
    machine: Machine
    torch: dict[str, Any]
    cuda: list[dict[str, Any]]
    kernels: dict[str, str]
    packages: dict[str, str | None]
    models: dict[str, Any]
    self_check: dict[str, Any]
    advice: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return bool(self.self_check["passed"])


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Say which hardware, kernels and models are there, what would be slow and why; check the kernels."""
    report = examine()
    if as_json:
        print(json.dumps(plain(report), indent=2))
    else:
        show(report)
    if not report.healthy:
        raise typer.Exit(CHECK_FAILED)


def examine() -> DoctorReport:
    import torch

    from paceline.cli.selfcheck import check_batch_invariance

    machine = inspect_machine()
    cuda = _cuda_devices(torch)
    report = DoctorReport(
        paceline=__version__,
        python=platform.python_version(),
        machine=machine,
        torch={
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        cuda=cuda,
        kernels={
            "reference": "available: the oracle, plain torch, deterministic",
            "eager": "available: torch operations, the default for models in floats",
            "native": _native(),
            "triton": _triton(cuda),
        },
        packages={name: _version(name) for name in _OPTIONAL},
        models=_cached_models(),
        self_check=check_batch_invariance(),
    )
    report.advice = advise(report, os.environ)
    return report


def _native() -> str:
    from paceline.kernels import cpu

    module = cpu.load()
    if module is None:
        return f"not built, so quantised models run in torch, several times slower: {cpu.HOW_TO_BUILD}"
    return f"available: C++ for quantised models on the CPU, the default for them ({module.available_kernels()[0]})"


def _triton(cuda: list[dict[str, Any]]) -> str:
    """What runs on a card, or why nothing does."""
    if not cuda:
        return "not used: no CUDA device"
    if _version("triton") is None:
        return "not installed, so there are no kernels for CUDA: it comes with torch's CUDA builds for Linux"
    if all(device["problem"] for device in cuda):
        return "cannot run on the devices here"
    return "available: the default on CUDA devices, steps captured as graphs"


def advise(report: DoctorReport, environment: Any) -> list[str]:
    """What would be slow or missing on this machine, a sentence each."""
    machine, advice = report.machine, []
    if not machine.has_bf16:
        advice.append("bfloat16 would be slow: this CPU has no instructions for it, so each value is widened in "
                      "software. dtype 'auto' stays with float32.")
    if not machine.has_fp16:
        advice.append("float16 would be slow: this CPU computes it by converting to float32. Leave dtype at 'auto'.")
    threads = report.torch["threads"]
    if threads > machine.usable_cores:
        advice.append(f"torch uses {threads} threads but only {machine.usable_cores} cores are usable: set "
                      f"OMP_NUM_THREADS={machine.usable_cores}, or threads wait for one another.")
    elif threads < machine.usable_cores and "OMP_NUM_THREADS" in environment:
        advice.append(f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']} leaves some of {machine.usable_cores} usable "
                      "cores idle: unset it to use them all.")
    if machine.memory_available < 2 * _GIB:
        advice.append(f"Only {machine.memory_available / _GIB:.1f} GiB of memory are free: the cache will be small and "
                      "long or many requests will be preempted.")
    advice += [device["problem"] for device in report.cuda if device["problem"]]
    torch_version = tuple(int(part) for part in report.torch["version"].split("+")[0].split(".")[:2])
    if not _TORCH_RANGE[0] <= torch_version <= _TORCH_RANGE[1]:
        advice.append(f"torch {report.torch['version']} is outside the tested range 2.11 to 2.13.")
    for name, purpose in _OPTIONAL.items():
        if report.packages[name] is None:
            advice.append(f"{name} is not installed: no {purpose}.")
    if not report.models["cached"]:
        advice.append("No model is cached: the default one (93 MB) is fetched on first use.")
    if not report.healthy:
        advice.append("The deterministic kernels gave different bits at different batch sizes on this machine: please "
                      "report it with this output.")
    return advice


def _cuda_devices(torch: Any) -> list[dict[str, Any]]:
    from paceline.engine.card import inspect_card, unsupported

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        card = inspect_card(torch.device("cuda", index))
        devices.append({
            "index": index,
            "name": card.name,
            "memory": card.total,
            "memory_free": card.free,
            "compute_capability": "{}.{}".format(*card.capability),
            "fits": card.fits,
            "problem": unsupported(card),
        })
    return devices


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cached_models() -> dict[str, Any]:
    """What this user's caches hold: models that were pulled or came through pip, and those the hub's client fetched."""
    from paceline.hub.cache import cache_dir
    from paceline.hub.store import local_models

    return {"folder": str(cache_dir()), "cached": [
        {"name": model.name, "path": str(model.path), "bytes": model.bytes, "ready": model.ready}
        for model in local_models()]}


def show(report: DoctorReport) -> None:
    """The report for a person."""
    from rich.table import Table

    out = console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()

    def row(name: str, text: str) -> None:
        table.add_row(name, text)

    machine = report.machine
    total = "" if machine.memory_total is None else f" of {machine.memory_total / _GIB:.1f}"
    row("paceline", f"{report.paceline}, Python {report.python}, {machine.system} {machine.architecture}")
    row("cpu", f"{machine.cpu}, {machine.usable_cores} usable of {machine.cores} cores")
    row("instructions", " ".join(machine.instruction_sets) or "unknown")
    row("memory", f"{machine.memory_available / _GIB:.1f}{total} GiB free")
    for device in report.cuda:
        row("cuda", f"{device['index']}: {device['name']}, {device['memory_free'] / _GIB:.1f} of "
                    f"{device['memory'] / _GIB:.1f} GiB free, compute capability {device['compute_capability']}")
        row("", f"room for {device['fits']}")
    if not report.cuda:
        row("cuda", "no device")
    row("torch", f"{report.torch['version']}, {report.torch['threads']} threads, {report.torch['cpu_capability']}")
    for name, text in report.kernels.items():
        row(f"kernels: {name}", text)
    row("packages", ", ".join(f"{name} {found or 'missing'}" for name, found in report.packages.items()))
    row("model cache", report.models["folder"])
    for model in report.models["cached"]:
        state = "" if model["ready"] else ", incomplete: continued on next use"
        row("", f"{model['name']}, {model['bytes'] / 1e6:.1f} MB{state}")
    check = report.self_check
    row("self-check", f"{'passed' if check['passed'] else 'FAILED'}: {check['detail']}")
    out.print(table)
    if report.advice:
        out.print("\nWhat to know", style="bold")
        for sentence in report.advice:
            out.print(f"- {sentence}", markup=False)

