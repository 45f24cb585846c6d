"""A stand-in for the hub: its API and its files on one port of this machine, a CDN for large files on another."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Asked:
    """One request that arrived."""

    at: str
    path: str
    headers: dict[str, str]


@dataclass
class StandIn:
    """What the hub has, and how it misbehaves."""

    files: dict[str, bytes]
    repo: str = "owner/name"
    token: str | None = None
    """Without it the repository is gated."""
    large: int = 1000
    """Files from this size on are LFS: the CDN has them, and their SHA-256 is told."""
    commit: str = COMMIT
    cut: list[int] = field(default_factory=list)
    """The next answers with a file break off after so many bytes."""
    cut_lists: list[int] = field(default_factory=list)
    """Likewise the next lists of files."""
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """The next answers are these instead, status and headers."""
    ranges: bool = True
    page: int = 1000
    """Files a page of the list."""
    etag: str = '"1"'
    lied: dict[str, str] = field(default_factory=dict)
    """SHA-256 that are told of files, right or wrong."""
    circles: bool = False
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    cdn: str = ""
    hold: threading.Event | None = None
    """Files wait for it."""

    def count(self, at: str) -> Counter[str]:
        return Counter(one.path for one in self.asked if one.at == at)

    def entry(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content),
                                 "oid": hashlib.sha1(content).hexdigest()}
        if len(content) >= self.large:
            entry["lfs"] = {"oid": self.lied.get(path, hashlib.sha256(content).hexdigest()), "size": len(content)}
        return entry


def _handler(hub: StandIn, at: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *ignored: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            hub.asked.append(Asked(at, address.path, {name.lower(): value for name, value in self.headers.items()}))
            if hub.answers:
                status, headers = hub.answers.pop(0)
                self.answer(status, b"no", **headers)
            elif at == "cdn":
                self.file(unquote(address.path).removeprefix("/blob/"))
            elif hub.circles:
                self.answer(302, Location=self.path)
            elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self.answer(401, X_Error_Code="GatedRepo")
            elif address.path == f"/api/models/{hub.repo}/revision/main":
                self.answer(200, json.dumps({"sha": hub.commit, "cardData": {"license": "apache-2.0"}}).encode())
            elif address.path == f"/api/models/{hub.repo}/tree/{hub.commit}":
                self.tree(address.query)
            elif address.path.startswith(f"/{hub.repo}/resolve/"):
                path = unquote(address.path).split("/", 5)[5]
                if path not in hub.files:
                    self.answer(404)
                elif len(hub.files[path]) >= hub.large:
                    self.answer(302, Location=f"{hub.cdn}/blob/{path}?signature=secret")
                else:
                    self.file(path)
            else:
                self.answer(404, X_Error_Code="RepoNotFound")

        def tree(self, query: str) -> None:
            names = list(hub.files)
            start = int(query.rpartition("cursor=")[2]) if "cursor=" in query else 0
            body = json.dumps([{"type": "directory", "path": "sub", "oid": "0"},
                               *map(hub.entry, names[start:start + hub.page])]).encode()
            further = start + hub.page < len(names)
            place = f"{hub.url}{urlsplit(self.path).path}?recursive=true&cursor={start + hub.page}"
            more = {"Link": f'<{place}>; rel="next"'}
            if hub.cut_lists:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:hub.cut_lists.pop(0)])
                self.close_connection = True
                return
            self.answer(200, body, **(more if further else {}))

        def file(self, path: str) -> None:
            if hub.hold is not None:
                hub.hold.wait(10)
            content, start = hub.files[path], 0
            span = self.headers.get("Range")
            same = self.headers.get("If-Range") in (None, hub.etag)
            if span and hub.ranges and same:
                start = int(span.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.answer(416)
                    return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("ETag", hub.etag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body = content[start:]
            if hub.cut:
                body = body[:hub.cut.pop(0)]
                self.close_connection = True
            self.wfile.write(body)
            self.wfile.flush()

    return Handler


@contextmanager
def running(hub: StandIn) -> Iterator[StandIn]:
    with ExitStack() as stack:
        for at in ("hub", "cdn"):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub, at)))
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            address = f"http://127.0.0.1:{server.server_address[1]}"
            if at == "hub":
                hub.url = address
            else:
                hub.cdn = address
        yield hub
