"""`paceline doctor`: the facts, the advice that follows from them, and a self-check that can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paceline.cli import doctor, selfcheck
from paceline.cli.main import main
from paceline.kernels.eager import EagerKernels
from paceline.measure import machine

FINE = machine.Machine(
    system="Linux 6", architecture="x86_64", cpu="A Fast One", cores=8, usable_cores=8,
    instruction_sets=("avx2", "avx512_bf16", "avx512_fp16"), memory_total=64 << 30, memory_available=32 << 30)


def report(**changes):
    fields = {
        "paceline": "0", "python": "3.12", "machine": FINE, "cuda": [], "kernels": {},
        "torch": {"version": "2.13.0+cpu", "threads": 8, "cpu_capability": "AVX512"},
        "packages": dict.fromkeys(doctor._OPTIONAL, "5"),
        "models": {"folder": "/cache", "cached": [{"name": "m", "path": "/m", "bytes": 1, "ready": True}]},
        "self_check": {"passed": True, "detail": "fine"},
    }
    return doctor.DoctorReport(**{**fields, **changes})


def advice(environment=None, **changes):
    return doctor.advise(report(**changes), environment or {})


def test_a_fine_machine_needs_no_advice():
    assert advice() == []


@pytest.mark.parametrize(("changes", "word"), [
    ({"machine": replace(FINE, instruction_sets=("avx2", "avx512_fp16"))}, "bfloat16"),
    ({"machine": replace(FINE, instruction_sets=("avx2", "avx512_bf16"))}, "float16"),
    ({"machine": replace(FINE, usable_cores=4)}, "OMP_NUM_THREADS=4"),
    ({"machine": replace(FINE, memory_available=1 << 30)}, "1.0 GiB"),
    ({"cuda": [{"index": 0, "problem": "Old GPU: the CUDA kernels need compute capability 8.0"}]}, "Old GPU"),
    ({"torch": {"version": "2.9.1", "threads": 8}}, "outside the tested range"),
    *(({"packages": dict.fromkeys(doctor._OPTIONAL, "5") | {missing: None}}, f"{missing} is not installed")
      for missing in doctor._OPTIONAL),
    ({"models": {"folder": "/cache", "cached": []}}, "fetched on first use"),
    ({"self_check": {"passed": False, "detail": "linear"}}, "different bits"),
])
def test_each_trouble_gets_one_sentence(changes, word):
    sentences = advice(**changes)
    assert len(sentences) == 1 and word in sentences[0]


def test_idle_cores_are_noticed_only_when_the_environment_says_so():
    idle = {"torch": {"version": "2.12.0", "threads": 1}}
    assert advice(**idle) == []
    assert "unset it" in advice({"OMP_NUM_THREADS": "1"}, **idle)[0]


def test_the_self_check_passes_on_this_machine_and_restores_the_threads():
    threads = torch.get_num_threads()
    result = selfcheck.check_batch_invariance()
    assert result["passed"], result
    assert result["comparisons"] > 50
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("op", ["linear", "rms_norm", "silu_mul", "rotate"])
def test_the_self_check_notices_a_kernel_that_depends_on_the_batch(op, monkeypatch):
    class Leaky(EagerKernels):
        pass

    def leaky(self, x, *rest):
        return getattr(super(Leaky, self), op)(x, *rest) + len(x) * 1e-6

    setattr(Leaky, op, leaky)
    monkeypatch.setattr(selfcheck, "select", lambda deterministic, device: Leaky())
    result = selfcheck.check_batch_invariance()
    assert not result["passed"]
    assert op in result["differences"]


def test_the_self_check_notices_attention_that_depends_on_neighbours(monkeypatch):
    class Leaky(EagerKernels):
        def attend(self, q, *rest):
            return super().attend(q, *rest) + q.mean() * 1e-6

    monkeypatch.setattr(selfcheck, "select", lambda deterministic, device: Leaky())
    assert "attend" in selfcheck.check_batch_invariance()["differences"]


def test_doctor_prints_for_people_and_for_programs(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "self-check" in text and "kernels: triton" in text and torch.__version__ in text
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["cores"] >= facts["machine"]["usable_cores"] >= 1
    assert set(facts["kernels"]) == {"reference", "eager", "native", "triton"}
    assert facts["self_check"]["passed"] is True


def test_doctor_fails_when_the_self_check_does(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: report(self_check={"passed": False, "detail": "linear"}))
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.fixture
def card(monkeypatch):
    """A card that is not there, of any capability."""
    def make(major, minor, free=60 << 30):
        properties = SimpleNamespace(name="Some GPU", major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    return make


def test_cuda_devices_are_described_with_what_fits_them(capsys, card):
    card(9, 0)
    devices = doctor._cuda_devices(torch)
    assert devices[0]["memory"] == 80 << 30 and devices[0]["compute_capability"] == "9.0"
    assert devices[0]["problem"] is None
    doctor.show(report(cuda=devices))
    text = " ".join(capsys.readouterr().out.split())
    assert "0: Some GPU, 60.0 of 80.0 GiB free, compute capability 9.0" in text
    assert "up to about 28.5 billion parameters in bfloat16" in text


def test_a_card_that_is_too_old_is_named_with_what_would_do(card):
    card(7, 5)
    devices = doctor._cuda_devices(torch)
    sentences = advice(cuda=devices)
    assert len(sentences) == 1
    assert "Some GPU (compute capability 7.5" in sentences[0] and "kernels='eager'" in sentences[0]


def test_cached_models_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert doctor._cached_models()["folder"].startswith(str(tmp_path))
    folder = tmp_path / "models" / "smollm2-135m" / "partial"
    folder.mkdir(parents=True)
    (folder / "half.whl").write_bytes(b"x" * 1000)
    models = doctor._cached_models()
    assert ("smollm2-135m", False) in [(model["name"], model["ready"]) for model in models["cached"]]
    doctor.show(report(models=models))
    assert "incomplete" in capsys.readouterr().out


def test_hub_models_are_listed(tmp_path, monkeypatch):
    blob = tmp_path / "models--owner--name" / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"x" * 10)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "own"))
    found = doctor._cached_models()["cached"]
    assert [(m["name"], m["bytes"], m["ready"]) for m in found] == [("owner/name", 10, False)]


X86 = "processor : 0\nmodel name : Some Xeon\nflags : fpu avx2 amx_bf16\n\nprocessor : 1\nmodel name : Other\n"
ARM = "processor : 0\nFeatures : fp asimd bf16\nCPU implementer : 0x41\nCPU part : 0xd4f\n"


def test_processor_names_from_cpuinfo(monkeypatch):
    files = {"/proc/cpuinfo": X86}
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    found = machine.inspect_machine()
    assert (found.cpu, found.instruction_sets, found.has_bf16, found.has_fp16) == (
        "Some Xeon", ("avx2", "amx_bf16"), True, False)
    files["/proc/cpuinfo"] = ARM
    assert machine.inspect_machine().cpu == "Arm Neoverse V2"
    files["/proc/cpuinfo"] = ARM.replace("0xd4f", "0x999")
    assert "0x999" in machine.inspect_machine().cpu
    files.clear()
    assert machine.inspect_machine().cpu


@pytest.mark.parametrize(("text", "cores"), [
    ("200000 100000", 2.0), ("50000 100000", 0.5), ("max 100000", None), ("", None), ("1 0", None)])
def test_container_limits(text, cores):
    assert machine._cgroup_quota(text) == cores
