"""bench load: a fresh process loads a model, says how long it took and what it needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.load import run
from paceline.errors import PacelineError


def test_a_folder_that_is_no_model_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="could not be loaded"):
        run(str(tmp_path), 1)
