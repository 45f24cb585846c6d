"""The wheel is all that a machine needs: it is built, installed where no checkout is, and answers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from paceline import __version__

ROOT = Path(__file__).parents[2]
SHIPPED = ("py.typed", "serve/page/static/index.html", "bench/questions.jsonl",
           "heads/smollm2-135m/dspark/model.safetensors")


def run(*command: str | Path, cwd: Path) -> str:
    """Outside the checkout, with nothing of this process's paths."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True,
                          timeout=400, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_is_built_for_this_machine_alone() -> None:
    """Kernels of better processors are chosen at run time: `native/dispatch.cpp`."""
    rules = (ROOT / "CMakeLists.txt").read_text()
    assert "-march=native" not in rules
    assert "-mcpu=native" not in rules and "-mtune=native" not in rules


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.real_model
def test_a_wheel_answers_outside_the_checkout(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    wheel = next(tmp_path.glob("paceline-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in SHIPPED if f"paceline/{name}" not in names]
    assert any(name.startswith("paceline/kernels/cpu/_native") for name in names), "no compiler was found"
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    # What it depends on is taken from this environment: torch alone would be hundreds of megabytes.
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(python, "-c", "import paceline; print(paceline.__file__)", cwd=tmp_path).strip()
    assert found.startswith(str(place))
    command = place / "bin" / "paceline"
    assert run(command, "--version", cwd=tmp_path).split() == ["paceline", __version__]
    assert "native" in run(command, "doctor", cwd=tmp_path)
    assert run(command, "generate", "The capital of France is", "--max-tokens", "4", cwd=tmp_path).strip()
