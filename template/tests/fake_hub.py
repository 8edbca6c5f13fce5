"""A hub on this machine: the few answers of the real one that downloads need, and its failures."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Faults:
    """What goes wrong: an answer to everything, bodies cut after so many bytes, wrong bytes."""

    status: int = 200
    code: str = ""
    file_status: int = 200
    cut: int = 0
    garbled: bool = False


@dataclass
class FakeHub:
    """Serves folders by name: models as OWNER/NAME, data sets as datasets/OWNER/NAME."""

    folders: dict[str, Path]
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, str]] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def bodies(self) -> list[tuple[str, str]]:
        """(file, Range) of every file that was asked for."""
        return [
            (path.rpartition("/")[2], extent)
            for verb, path, extent in self.requests
            if verb == "GET" and "/resolve/" in path
        ]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, extent = urlsplit(handler.path).path, handler.headers.get("Range", "")
        self.requests.append((handler.command, path, extent))
        faults = self.faults
        status = faults.status
        if status == 200 and "/resolve/" in path:
            status = faults.file_status
        if status != 200:
            return self._send(handler, status, b"{}", {"X-Error-Code": faults.code})
        for name, folder in self.folders.items():
            if path.startswith(f"/api/models/{name}"):
                return self._send(handler, 200, self._listing(name, folder), {})
            if path.startswith(f"/{name}/resolve/"):
                file = path.split("/resolve/")[1].partition("/")[2]
                return self._file(handler, folder / file, extent)
        self._send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _listing(self, name: str, folder: Path) -> bytes:
        siblings = []
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = {"rfilename": path.relative_to(folder).as_posix()}
                entry |= {"size": path.stat().st_size, "blobId": blob_id(path)}
                if path.suffix == ".safetensors":
                    entry["lfs"] = {"sha256": sha256(path), "size": entry["size"]}
                    entry["lfs"]["pointerSize"] = 130
                siblings.append(entry)
        return json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, handler: BaseHTTPRequestHandler, path: Path, extent: str) -> None:
        content = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{blob_id(path)}"'}
        if path.suffix in (".safetensors", ".zst"):
            headers["X-Linked-ETag"], headers["X-Linked-Size"] = sha256(path), str(len(content))
        if self.faults.garbled:
            content = bytes(len(content))
        begin = int(extent.removeprefix("bytes=").partition("-")[0]) if extent else 0
        body = content[begin:]
        if extent:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._send(handler, 206 if extent else 200, body, headers)

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if self.faults.cut and len(body) > self.faults.cut:
            handler.wfile.write(body[: self.faults.cut])
            handler.wfile.flush()
            self.faults.status = 503  # it died
            handler.close_connection = True
            return
        handler.wfile.write(body)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
