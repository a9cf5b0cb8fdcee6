"""A stand-in of the Hugging Face Hub on loopback, for the real huggingface_hub.

It answers the requests of a client of models: /api/models/... and /ORG/NAME/resolve/REVISION/FILE,
with commits, ETags and the redirects of large files like the hub's.

    with Hub() as hub:
        commit = hub.push("org/name", directory)
        environ["HF_ENDPOINT"] = hub.url
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

#: The endings of files that the hub keeps as large files, named by SHA-256.
LARGE = (".safetensors", ".bin", ".gguf", ".pt")


class _File:
    def __init__(self, content: bytes, large: bool) -> None:
        self.content = content
        self.large = large
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.git


class Hub:
    """A context manager; listens on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        #: Files by repository and commit; the last commit is main.
        self.commits: dict[str, dict[str, dict[str, _File]]] = {}
        self.unknown: list[str] = []  # Requests to unknown endpoints.
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub._answer(self)

            def do_GET(self) -> None:
                hub._answer(self)

            def do_POST(self) -> None:
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def push(self, repository: str, directory: Path) -> str:
        """Makes the files of a directory the newest commit of a repository; returns its id."""
        files = {
            str(path.relative_to(directory)): _File(path.read_bytes(), path.suffix in LARGE)
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        tree = "".join(f"{name} {file.git}\n" for name, file in files.items())
        commit = hashlib.sha1(f"{repository}\n{tree}".encode()).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        return commit

    # ---- responses

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        status, headers, body = self._look_up(path, request)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        if "Content-Length" not in headers:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def _look_up(
        self, path: str, request: http.server.BaseHTTPRequestHandler
    ) -> tuple[int, dict[str, str], bytes]:
        if path.startswith("/large/"):
            for file in self._all_files():
                if file.sha256 == path.removeprefix("/large/"):
                    return 200, {"ETag": f'"{file.sha256}"'}, file.content
        for name, commits in self.commits.items():
            if path == f"/api/models/{name}" or path.startswith(f"/api/models/{name}/"):
                return self._api(name, commits, path.removeprefix(f"/api/models/{name}"), request)
            if path.startswith(f"/{name}/resolve/"):
                return self._resolve(commits, path.removeprefix(f"/{name}/resolve/"))
        self.unknown.append(f"{request.command} {request.path}")
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _all_files(self) -> Iterator[_File]:
        for commits in self.commits.values():
            for files in commits.values():
                yield from files.values()

    @staticmethod
    def _commit(commits: dict[str, Any], revision: str) -> str | None:
        if revision in ("main", "HEAD"):
            return list(commits)[-1]
        return revision if revision in commits else None

    def _api(
        self,
        name: str,
        commits: dict[str, dict[str, _File]],
        rest: str,
        request: http.server.BaseHTTPRequestHandler,
    ) -> tuple[int, dict[str, str], bytes]:
        kind, revision, inside = ([*rest.strip("/").split("/", 2), "", "", ""])[:3]
        commit = self._commit(commits, revision or "main")
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = commits[commit]
        answer: Any
        if kind in ("", "revision"):
            siblings = [{"rfilename": one} for one in files]
            answer = {"id": name, "modelId": name, "sha": commit, "private": False}
            answer |= {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0}
        elif kind == "tree":
            answer = [self._entry(one, file) for one, file in files.items() if _in(one, inside)]
        elif kind == "paths-info":
            fields = urllib.parse.parse_qs(request.body.decode())
            if request.headers.get("Content-Type", "").startswith("application/json"):
                fields = json.loads(request.body)
            answer = [self._entry(one, files[one]) for one in fields["paths"] if one in files]
        else:
            self.unknown.append(f"{request.command} {request.path}")
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    @staticmethod
    def _entry(name: str, file: _File) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(file.content), "oid": file.git}
        if file.large:
            entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 134}
        return entry

    def _resolve(
        self, commits: dict[str, dict[str, _File]], rest: str
    ) -> tuple[int, dict[str, str], bytes]:
        revision, _, name = rest.partition("/")
        commit = self._commit(commits, revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        headers = {"X-Repo-Commit": commit}
        file = commits[commit].get(name)
        if file is None:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        if not file.large:
            return 200, headers | {"ETag": f'"{file.etag}"'}, file.content
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
        # On another host, like the hub's: the client then keeps the headers of this response.
        place = f"http://localhost:{self._server.server_port}/large/{file.sha256}"
        return 302, headers | {"Location": place}, b""


def _in(name: str, directory: str) -> bool:
    return not directory or name.startswith(directory + "/")
