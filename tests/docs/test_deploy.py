"""What deploy/ says of the command line, of ports and of files is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from docs.test_examples import ROOT, parse
from paceline.cli.main import app
from paceline.cli.serve import settings

yaml = pytest.importorskip("yaml")
DEPLOY = ROOT / "deploy"


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def test_the_image_is_made_of_what_is_there_and_serves() -> None:
    dockerfile = text("Dockerfile")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
              for word in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text()
    assert copied and all((ROOT / name).exists() and f"!{name}\n" in ignored for name in copied)
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    words = yaml.safe_load(re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)[-1])
    parse(typer.main.get_command(app), words)


def test_compose_runs_what_is_there() -> None:
    compose = yaml.safe_load(text("compose.yaml"))
    server = compose["services"]["paceline"]
    parse(typer.main.get_command(app), server["command"])
    known = {settings().variable(one) for one in settings()}
    assert {name for name in server["environment"] if name.startswith("PACELINE_SERVE_")} <= known
    for name in compose["services"]["grafana"]["volumes"]:
        assert (DEPLOY / name.split(":")[0]).exists(), name
    scraped = yaml.safe_load(compose["configs"]["prometheus"]["content"])["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["paceline:8000"] and "metrics_path" not in scraped
    for name in ("datasource.yaml", "dashboards.yaml"):
        assert yaml.safe_load(text(f"grafana/{name}"))["apiVersion"] == 1


def test_the_unit_starts_a_server(tmp_path: Path) -> None:
    started = re.search(r"^ExecStart=\S+/paceline (.*)$", text("paceline.service"), re.MULTILINE)
    assert started is not None
    (tmp_path / "serve.toml").touch()
    parse(typer.main.get_command(app), shlex.split(started[1].replace("/etc/paceline", str(tmp_path))))
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text("paceline.service"), re.MULTILINE)
    assert stop is not None and int(stop[1]) > 30, "longer than --drain"


def test_types_are_for_others_too() -> None:
    assert (ROOT / "src" / "paceline" / "py.typed").is_file()
