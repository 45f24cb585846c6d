"""The tool that takes the pictures of the documents still finds its way through the page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import ServerThread

import page_pictures


@pytest.mark.full
def test_pictures_of_all_views_are_taken(server: ServerThread, tmp_path: Path) -> None:
    """In a process of its own: the browser of the other tests may be at work in this one."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not any(map(shutil.which, page_pictures.BROWSERS)):
        pytest.skip("there is no Chromium here")
    command = ("import page_pictures, pathlib\n"
               f"page_pictures.pictures({server.url!r}, pathlib.Path({str(tmp_path)!r}), [''])")
    subprocess.run([sys.executable, "-c", command], check=True, timeout=240, cwd=Path(page_pictures.__file__).parent)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "page-chat.png", "page-live.png", "page-race.png", "page-request.png"]
