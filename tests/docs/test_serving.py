"""What the documents show of the server works: curl lines and Python blocks are run against the default model."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import ServerThread

from docs.test_examples import SERVER, Block, blocks

pytestmark = pytest.mark.real_model

STRICT = """curl() { command curl --silent --show-error --fail-with-body --max-time 120 "$@"; echo; }
set -e
"""


@pytest.fixture(scope="module")
def url(default_model_path: Path) -> Iterator[str]:
    with ServerThread(default_model_path, name="smollm2-135m", max_model_len=1024) as server:
        yield server.url


@pytest.mark.parametrize("block", [block for block in blocks("python") if SERVER in block.text], ids=str)
def test_python_blocks_run(block: Block, url: str) -> None:
    code = compile("\n" * (block.line - 1) + block.text.replace(SERVER, url), str(block.page), "exec")
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_curl_lines_run(block: Block, url: str) -> None:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("there is no curl here")
    assert all(line.startswith(("curl ", "  ")) for line in block.text.splitlines()), "only curl is run here"
    done = subprocess.run(["bash", "-c", STRICT + block.text.replace(SERVER, url)], capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Responses have a field for it, which is null.
    assert done.stdout.strip() and not re.search(r'"error": ?[{"]', done.stdout)


def test_there_is_something_to_run() -> None:
    assert len(blocks("sh")) >= 3
    assert sum(SERVER in block.text for block in blocks("python")) >= 3
