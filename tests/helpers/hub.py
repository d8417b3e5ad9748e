"""A stand-in for the hub on this machine: repositories are folders, and every request is recorded."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from helpers.processes import run_commands

COMMIT = "c0ffee" + "0" * 34
Outcome = tuple[int, str, str]


class Hub(ThreadingHTTPServer):
    """Serves `root`/OWNER/NAME; `cut` = (file, bytes, times): where downloads are interrupted."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Answer)
        self.root, self.requested, self.cut = root, [], None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        self.server.requested.append((self.command, self.path, self.headers.get("Range")))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        # repositories of datasets are answered like those of models
        parts = self.path.split("?")[0].strip("/").removeprefix("datasets/").split("/")
        if parts[:2] == ["api", "models"]:
            self.repository_info("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.file(self.server.root / "/".join(parts[:2]) / "/".join(parts[4:]))
        else:
            self.send_not_found("EntryNotFound")

    def repository_info(self, repo: str, rest: list[str]) -> None:
        folder = self.server.root / repo
        revision = rest[1] if len(rest) > 1 else "main"
        if not folder.is_dir():
            return self.send_not_found("RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.send_not_found("RevisionNotFound")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if rest[:1] == ["tree"]:
            sizes = {str(path.relative_to(folder)): (path.stat().st_size, etag(path)) for path in files}
            found = ({"path": name, "size": size, "oid": oid} for name, (size, oid) in sizes.items())
            return self.send_json([{"type": "file", **each} for each in found])
        siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
        return self.send_json({"id": repo, "sha": COMMIT, "siblings": siblings})

    def file(self, path: Path) -> None:
        if not path.is_file():
            return self.send_not_found("EntryNotFound")
        body, requested = path.read_bytes(), self.headers.get("Range")
        first = int(requested.removeprefix("bytes=").split("-")[0]) if requested else 0
        self.send_response(206 if requested else 200)
        self.send_header("ETag", f'"{etag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - first))
        if requested:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        name, most, times = self.server.cut or ("", 0, 0)
        if path.name == name and times:
            self.server.cut = (name, most, times - 1)
            self.wfile.write(body[first:most])
            self.close_connection = True
            return self.connection.close()
        self.wfile.write(body[first:])
        return None

    def send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_not_found(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """The stand-in while the block lasts."""
    server = Hub(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def run_with_hub(place: Path, address: str, *requested: list[str], **more: str) -> list[Outcome]:
    """How commands in one process ended, with a hub at an address: status, stdout, stderr."""
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(place / "home"), "HF_HUB_DISABLE_XET": "1"}
    env |= {"XDG_CACHE_HOME": str(place / "cache"), "NO_PROXY": "127.0.0.1"} | more
    return run_commands(requested, place, env=env)[1]
