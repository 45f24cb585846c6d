"""`paceline serve` as a command: what it refuses before it loads anything, and what it needs to be there."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.serve.hosts import is_loopback
from paceline.serve.options import ServeOptions
from paceline.serve.server import listen


def test_a_port_in_use_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "another --port" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, says", [
    (["--tool-parser", "nonsense"], "hermes"), (["--log-format", "xml"], "json"), (["--api-key", ""], "API key"),
    (["--max-samples", "0"], "max_samples"), (["--timeout", "0"], "timeout"), (["--drain", "-1"], "drain"),
    (["--allowed-host", "http://a"], "allowed host"), (["--max-connections", "0"], "max_connections"),
    (["--stall-timeout", "0"], "stall_s"), (["--capture", "sometimes"], "lazy"),
    (["--max-output-tokens", "0"], "max_output_tokens"), (["--speculation", "{"], "JSON"),
    (["--host", "nowhere.invalid"], "--host"), (["--host", "a..b"], "--host"), (["--port", "70000"], "--port"),
    (["--port", "-1"], "--port"), (["--port", "0", "--kv-events-replay", "5558"], "needs --kv-events"),
    (["--port", "0", "--kv-events", "5557", "--no-prefix-caching"], "prefix cache"),
    (["--port", "0", "--kv-events", "5557", "--replicas", "2"], "replicas have one each"),
    (["no-such-folder", "--port", "0"], "no-such-folder"),
])
def test_wrong_options_are_explained(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_keys_that_fit_no_header_are_refused() -> None:
    with pytest.raises(ConfigError, match="header"):
        ServeOptions(api_keys=("line\nbreak",))


def test_only_this_machine_is_let_in_by_default() -> None:
    with listen(ServeOptions(port=0)) as made:
        assert made.getsockname()[0] == "127.0.0.1" and is_loopback(ServeOptions().host)
    with listen(ServeOptions(port=0, host="0.0.0.0")) as made:
        assert made.getsockname()[0] == "0.0.0.0" and not is_loopback("0.0.0.0")


def test_without_the_servers_packages_only_the_server_is_missing() -> None:
    code = """
import sys
for name in ("fastapi", "uvicorn", "starlette", "prometheus_client"):
    sys.modules[name] = None
from paceline import LLM, AsyncLLM, SamplingParams
from paceline.cli.main import main
sys.exit(main(["serve", "--port", "0"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "The server needs the package" in done.stderr and "Traceback" not in done.stderr
