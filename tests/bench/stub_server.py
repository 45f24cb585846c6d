"""A server with OpenAI's API that is not ours: threads, spaces in its JSON, events torn over chunks, no metrics."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """`answer(place, body)`: what the request of that place gets: None, or a status. `word`: what its text is made of.
    `calls`: of tools instead of text, in chats. Bodies are kept."""

    def __init__(self, key: str | None = None, tokens: int = 5, usage: bool = True, chunked: bool = True,
                 answer: Callable[[int, dict[str, Any]], int | None] = lambda place, body: None,
                 stall_s: float = 0.0, model: str = "stub-model",
                 word: Callable[[dict[str, Any]], str] = lambda body: "w", calls: bool = False) -> None:
        self.calls = calls
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def allowed(self) -> bool:
                if key is None or self.headers.get("Authorization") == f"Bearer {key}":
                    return True
                self.plain(401, {"error": {"message": "no such key"}})
                return False

            def plain(self, status: int, content: dict[str, Any]) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                if self.path == "/v1/models" and self.allowed():
                    self.plain(200, {"object": "list", "data": [{"id": model}]})
                elif self.path != "/v1/models":
                    self.plain(404, {"error": {"message": "nothing here"}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    place = len(stub.bodies)
                    stub.bodies.append(body)
                    stub.paths.append(self.path)
                    stub.at_once += 1
                    stub.most_at_once = max(stub.most_at_once, stub.at_once)
                try:
                    if self.allowed():
                        status = answer(place, body)
                        if status is None:
                            self.stream(body)
                        else:
                            self.plain(status, {"error": {"message": f"said {status}"}})
                except OSError:
                    pass  # the client gave up
                finally:
                    with lock:
                        stub.at_once -= 1

            def stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                if chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                time.sleep(stall_s)
                if "messages" in body:
                    self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
                for place in range(min(tokens, body["max_tokens"])):
                    text = f"{word(body)}{place} "
                    delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if stub.calls \
                        else {"content": text}
                    piece = {"delta": delta} if "messages" in body else {"text": text}
                    self.event({"choices": [{"index": 0, "finish_reason": None, **piece}]})
                self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                if usage and body.get("stream_options", {}).get("include_usage"):
                    self.event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens,
                                                         "prompt_tokens_details": {"cached_tokens": 4}}})
                self.send(b"data: [DONE]\n\n")
                if chunked:
                    self.wfile.write(b"0\r\n\r\n")

            def event(self, content: dict[str, Any]) -> None:
                text = f"data: {json.dumps(content)}\n\n".encode()
                self.send(text[:20])
                self.send(text[20:])

            def send(self, data: bytes) -> None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
                self.wfile.flush()

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
