"""A local endpoint that answers as the Hugging Face Hub does about a few repositories."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Files = dict[str, bytes]


@dataclass
class Served:
    """An endpoint.

    Attributes:
        repositories: Files by path of each repository, as `models/someone/tiny`.
        endpoint: Its address.
        asked: The files that were downloaded, in order.
        made: The repositories that were made, and whether each is private.
        accepts: Whether it accepts uploads.
    """

    repositories: dict[str, Files]
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    made: dict[str, bool] = field(default_factory=dict)
    accepts: bool = True


class _Handler(BaseHTTPRequestHandler):
    served: Served

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if not path.startswith("api/"):
            place, _, rest = path.partition("/resolve/")
            name = rest.partition("/")[2]
            files = self._files(place)
            if files is None or name not in files:
                self._fail(404, "RepoNotFound" if files is None else "EntryNotFound")
                return
            if self.command == "GET":
                self.served.asked.append(name)
            self._answer(files[name])
            return
        place, _, folder = path.removeprefix("api/").partition(f"/tree/{COMMIT}")
        files = self._files(place.partition("/revision/")[0])
        if files is None:
            self._fail(404, "RepoNotFound")
        elif f"/tree/{COMMIT}" in path:
            self._answer_json(_entries(files, folder.strip("/"), "recursive=true" in self.path))
        else:
            name = "/".join(place.split("/")[1:3])
            siblings = [{"rfilename": file} for file in files]
            about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            self._answer_json({**about, "private": False, "tags": [], "downloads": 0, "likes": 0})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].removeprefix("/api/")
        if path == "repos/create":
            about = json.loads(body)
            name = f"{about['organization']}/{about['name']}"
            is_there = f"models/{name}" in self.served.repositories
            if not is_there:
                self.served.made[name] = about["visibility"] == "private"
                self.served.repositories[f"models/{name}"] = {}
            answer = {"url": f"{self.served.endpoint}/{name}", "name": name}
            self._answer_json(answer, status=409 if is_there else 200)
        elif not self.served.accepts:
            self._fail(403, "GatedRepo")
        elif "/preupload/" in path:
            whole = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **whole} for file in json.loads(body)["files"]]
            self._answer_json({"files": files})
        else:
            place = path.partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.served.repositories[place][line["value"]["path"]] = content
            url = f"{self.served.endpoint}/{place.removeprefix('models/')}/commit/{COMMIT}"
            self._answer_json({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _files(self, place: str) -> Files | None:
        place = place if place.startswith(("models/", "datasets/")) else f"models/{place}"
        return self.served.repositories.get(place)

    def _answer_json(self, values: Any, status: int = 200) -> None:
        self._answer(json.dumps(values).encode(), status)

    def _answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_hash(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _entries(files: Files, folder: str, recursive: bool) -> list[dict[str, Any]]:
    found = {
        path: {"type": "file", "path": path, "size": len(content), "oid": _hash(content)}
        for path, content in files.items()
    }
    for path in [path for path in files if "/" in path]:
        above = path.rpartition("/")[0]
        found[above] = {"type": "directory", "path": above, "size": 0, "oid": _hash(b"")}
    inside = [
        path
        for path in found
        if path.rpartition("/")[0] == folder or (recursive and path.startswith(folder))
    ]
    return [found[path] for path in inside]


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def files_of(folder: Path) -> Files:
    """The files in a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@contextmanager
def serve(
    repositories: dict[str, Files], cache: Path, patch: pytest.MonkeyPatch
) -> Iterator[Served]:
    """Serves repositories, with an empty cache, as HF_ENDPOINT and HF_HOME would set them."""
    served = Served(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": served}))
    served.endpoint = endpoint = f"http://127.0.0.1:{server.server_port}"
    # The packages read the environment when they are imported.
    settings = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache / "hub"), "HF_HUB_OFFLINE": False}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    settings["HF_HUB_DISABLE_XET"] = True
    for name, value in settings.items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    patch.setattr("datasets.config.HF_ENDPOINT", endpoint)
    patch.setattr("datasets.config.HF_DATASETS_CACHE", cache / "datasets")
    patch.setenv("HF_TOKEN", "hf_token")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
