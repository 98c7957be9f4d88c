"""A hub on loopback: the part of the Hugging Face hub's HTTP interface that huggingface_hub asks, and its failures.

Large files are redirected to another host, as the hub does. Every answer can be made to fail: see `Fault`.
"""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

# files of this name are in large-file storage
LARGE = re.compile(r"\.(safetensors|bin|gguf)$")
PIECE = 4096


@cache
def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def point_at(server: "HubServer", home: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub in this process use the server and a cache of its own; nobody is logged in."""
    patch.setattr(constants, "ENDPOINT", server.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.delenv("HF_TOKEN", raising=False)


def environment(server: "HubServer", home: Path) -> dict[str, str]:
    """The same for another process."""
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_TOKEN": ""}


@dataclass
class Fault:
    """What goes wrong with an answer: for a request whose path matches, and so many times.

    status, headers: an error instead of the answer. cut: the connection ends after so many bytes. short: the answer
    claims to be so many bytes long, and is. flip: the byte at this place of the file is another. pause: seconds of
    silence after so many bytes. extra: so many bytes behind the end. ignore_range: the whole file, whatever was asked
    for.
    """

    path: str = ""
    method: str = "GET"
    times: float = 1
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    short: int | None = None
    flip: int | None = None
    pause: tuple[int, float] | None = None
    extra: int = 0
    ignore_range: bool = False


@dataclass
class Repository:
    """Commits of a repository, by their id; `branches` name some. gated: only these tokens may read the files.

    private: only these tokens may know of it. xet: large files say that they are in the xet storage too.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: set[str] | None = None
    private: set[str] | None = None
    xet: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit on top of a branch, which then holds exactly these files."""
        tree = [(name, git_blob(content)) for name, content in sorted(files.items())]
        commit = hashlib.sha1(repr((tree, len(self.commits))).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        revision = self.branches.get(revision, revision)
        return revision if revision in self.commits else None


@dataclass(frozen=True)
class Request:
    """A request as it came. begin: first byte asked for."""

    method: str
    path: str
    begin: int
    token: str | None


class HubServer:
    """Serves repositories until closed; `requests` has all that came, `sent` the bytes of files that went out."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.sent = 0
        self.page = 1000  # entries in one answer of the tree
        self.pace = 0.0  # seconds for each piece of a file
        self.on_request: Callable[[Request], object] = lambda request: None
        self.connections: list[socket.socket] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.http.daemon_threads = False
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    @property
    def storage(self) -> str:
        """Where large files are: another host, to which no token may go."""
        return f"http://localhost:{self.http.server_port}/storage"

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        repository = self.repositories[name] = Repository(**options)
        repository.commit(files)
        return repository

    def fail(self, path: str = "", **what: Any) -> None:
        self.faults.append(Fault(path, **what))

    def asked(self, path: str, method: str = "GET") -> list[Request]:
        return [request for request in self.requests if re.search(path, request.path) and request.method == method]

    def take_fault(self, request: Request) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and fault.method == request.method and re.search(fault.path, request.path):
                    fault.times -= 1
                    return fault
        return None

    def close(self) -> None:
        self.closing.set()
        self.http.shutdown()
        for connection in self.connections:
            with suppress(OSError):  # most have ended
                connection.shutdown(socket.SHUT_RDWR)
        self.http.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5
    disable_nagle_algorithm = True  # it would cost 40 ms an answer

    def __init__(self, server: HubServer, *arguments: Any) -> None:
        self.hub = server
        server.connections.append(arguments[0])
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        parts = urlsplit(self.path)
        self.request_seen = Request(self.command, unquote(parts.path), int(begin[1]) if begin else 0, token)
        self.fault = self.hub.take_fault(self.request_seen) or Fault()
        self.hub.on_request(self.request_seen)
        if self.fault.status:
            self._answer(self.fault.status, b"{}", self.fault.headers)
        elif parts.path.startswith("/storage/"):
            self._storage(parts.path.rpartition("/")[2])
        elif parts.path.startswith("/api/models/"):
            self._api(parts.path.removeprefix("/api/models/"), parse_qs(parts.query), body)
        else:
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", parts.path)
            self._resolve(match[1], unquote(match[2]), unquote(match[3])) if match else self._refuse(404, "")

    def _open(self, name: str) -> Repository | None:
        """The repository, where the asker may know of it; else the refusal is answered."""
        repository, token = self.hub.repositories.get(name), self.request_seen.token
        if token == "wrong":
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif repository is None or (repository.private is not None and token not in repository.private):
            # the hub does not tell strangers which names are taken
            self._refuse(404 if token else 401, "RepoNotFound")
        else:
            return repository
        return None

    def _api(self, rest: str, query: dict[str, list[str]], body: bytes) -> None:
        name, _, rest = "/".join(rest.split("/")[:2]), "", "/".join(rest.split("/")[2:])
        repository = self._open(name)
        if repository is None:
            return
        what, _, revision = rest.partition("/")
        commit = repository.resolve(unquote(revision) if revision else "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound")
            return
        entries = [_entry(path, content) for path, content in sorted(repository.commits[commit].items())]
        if what == "tree":
            self._tree(entries, query)
        elif what == "paths-info":
            wanted = json.loads(body)["paths"]
            self._json([entry for entry in entries if entry["path"] in wanted])
        else:
            self._json({"id": name, "sha": commit, "siblings": [_sibling(entry, query) for entry in entries]})

    def _tree(self, entries: list[dict[str, Any]], query: dict[str, list[str]]) -> None:
        begin = int(query.get("cursor", ["0"])[0])
        end = begin + self.hub.page
        url = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={end}"
        self._json(entries[begin:end], {"Link": f'<{url}>; rel="next"'} if end < len(entries) else {})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._open(name)
        if repository is None:
            return
        commit = repository.resolve(revision)
        if repository.gated is not None and self.request_seen.token not in repository.gated:
            self._refuse(403 if self.request_seen.token else 401, "GatedRepo")
        elif commit is None:
            self._refuse(404, "RevisionNotFound")
        elif path not in repository.commits[commit]:
            self._refuse(404, "EntryNotFound")
        else:
            content = repository.commits[commit][path]
            headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if LARGE.search(path) and repository.xet:
                headers |= {"X-Xet-Hash": sha256(content), "X-Xet-Refresh-Route": f"{self.hub.url}/xet-token"}
            if LARGE.search(path):
                headers |= {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
                self._answer(302, b"", headers | {"Location": f"{self.hub.storage}/{sha256(content)}"})
            else:
                self._file(content, headers | {"ETag": f'"{git_blob(content)}"'})

    def _storage(self, digest: str) -> None:
        repositories = list(self.hub.repositories.values())
        contents = (content for each in repositories for files in each.commits.values() for content in files.values())
        found = next((content for content in contents if sha256(content) == digest), None)
        if found is None:
            self._refuse(404, "")
        else:
            self._file(found, {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})

    def _file(self, content: bytes, headers: dict[str, str]) -> None:
        fault, size, status = self.fault, len(content), 200
        if fault.flip is not None:
            content = content[: fault.flip] + bytes([content[fault.flip] ^ 1]) + content[fault.flip + 1 :]
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match and not fault.ignore_range:
            begin, end = int(match[1]), min(int(match[2] or size - 1), size - 1)
            if begin >= size:
                self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            content, status = content[begin : end + 1], 206
            headers = headers | {"Content-Range": f"bytes {begin}-{end}/{size}"}
        if fault.short is not None:
            content = content[: fault.short]
        self._answer(status, content + bytes(fault.extra), headers, counted=True)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._answer(status, b'{"error": "no"}', headers | ({"X-Error-Message": message} if message else {}))

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _answer(self, status: int, body: bytes, headers: dict[str, str], *, counted: bool = False) -> None:
        try:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self._send(body, counted)
        except OSError:
            self.close_connection = True  # who asked has gone

    def _send(self, body: bytes, counted: bool) -> None:
        pause, at = self.fault.pause, 0
        for piece in _pieces(body, [*([self.fault.cut] if self.fault.cut is not None else []), *(pause or ())[:1]]):
            if at == self.fault.cut or self.hub.closing.is_set():
                self.close_connection = True
                return
            if pause and at == pause[0]:
                self.wfile.flush()
                self.hub.closing.wait(pause[1])
            self.wfile.write(piece)
            at += len(piece)
            self.hub.sent += len(piece) if counted else 0
            if counted and self.hub.pace:
                self.wfile.flush()
                sleep(self.hub.pace)


def _pieces(body: bytes, edges: Iterable[int]) -> Iterable[bytes]:
    """The body in pieces that begin at the edges too."""
    begins = sorted({0, *range(0, len(body), PIECE), *(edge for edge in edges if edge < len(body))})
    return [body[begin:end] for begin, end in zip(begins, [*begins[1:], len(body)], strict=True)]


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """As the tree lists a file."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_blob(content)}
    if LARGE.search(path):
        entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
    return entry


def _sibling(entry: dict[str, Any], query: dict[str, list[str]]) -> dict[str, Any]:
    """As a model's information lists a file."""
    if "blobs" not in query:
        return {"rfilename": entry["path"]}
    large = entry.get("lfs")
    lfs = {"lfs": {"sha256": large["oid"], "size": large["size"], "pointerSize": 130}} if large else {}
    return {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"], **lfs}
