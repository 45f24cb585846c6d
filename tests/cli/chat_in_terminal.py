"""`paceline chat` with a model that says back what it was told: run by test_chat_in_a_terminal.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import paceline
from cli.conftest import FakeLLM
from paceline.cli.main import main


class EchoLLM(FakeLLM):
    def stream_chat(self, messages: Any, params: Any, *, progress: Any = None) -> Any:
        asked = messages[-1]["content"]
        self.answer = f"**Told**: {asked!r} {'x' * 500 if 'endless' in asked else '.'}"
        for done in (100, 2345):
            progress("prompt", done, 2345)
            time.sleep(0.15)  # the line that moves is drawn ten times a second
        for snapshot in super().stream_chat(messages, params):
            yield snapshot
            if "endless" in asked and len(snapshot.outputs[0].text) > 30:
                time.sleep(0.1)


if __name__ == "__main__":
    vars(paceline)["LLM"] = EchoLLM
    sys.exit(main(["chat", "some-model", "--temperature", "0"]))
