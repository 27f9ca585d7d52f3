"""A model hub on loopback: what huggingface_hub asks of one to make a repository, commit to it and read from it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants


class Hub:
    """Commits of each repository, the newest last, each with its files; and which repositories are private."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}

    def found(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """A commit and its files."""
        commits = self.commits.get(repo, {})
        commit = [*commits][-1] if commits and revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else None


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self) -> None:
            body, words = self.rfile.read(int(self.headers["Content-Length"])), self.path.split("/")[2:]
            if words == ["repos", "create"]:
                asked = json.loads(body)
                repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
                if repo in hub.commits:
                    return self.answer({"url": f"https://huggingface.co/{repo}"}, 409)
                hub.commits[repo], hub.private[repo] = (
                    {"0" * 40: {}},
                    asked.get("private") or asked.get("visibility") == "private",
                )
                return self.answer({"url": f"https://huggingface.co/{repo}"})
            if words == ["validate-yaml"]:
                return self.answer({"errors": [], "warnings": []})
            repo = "/".join(words[1:3])
            if words[3] == "preupload":
                files = [{"path": x["path"], "uploadMode": "regular"} for x in json.loads(body)["files"]]
                return self.answer({"files": [{**x, "shouldIgnore": False} for x in files]})
            lines = [json.loads(line) for line in body.splitlines()]
            added = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
            commit = hashlib.sha1(body).hexdigest()
            hub.commits[repo][commit] = {**hub.found(repo, "main")[1], **added}  # type: ignore[index]
            url = f"https://huggingface.co/{repo}/commit/{commit}"
            return self.answer({"success": True, "commitOid": commit, "commitUrl": url})

        def do_GET(self) -> None:
            words = unquote(self.path).strip("/").split("/")
            info = words[0] == "api"
            repo, words = "/".join(words[2:4] if info else words[:2]), words[4:] if info else words[2:]
            found = hub.found(repo, words[1] if len(words) > 1 else "main")
            if repo not in hub.commits:
                return self.answer({}, 404, X_Error_Code="RepoNotFound")
            if found is None:
                return self.answer({}, 404, X_Error_Code="RevisionNotFound")
            if info:
                return self.answer({"id": repo, "sha": found[0], "siblings": []})
            if words[2] not in found[1]:
                return self.answer({}, 404, X_Error_Code="EntryNotFound")
            content = found[1][words[2]]
            return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=found[0])

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def loopback_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """The hub to which huggingface_hub goes in the block, with an empty cache."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "none")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
