"""Names on the hub and what can go wrong there, against a small hub of our own on this machine."""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import pytest

from forerun.errors import DownloadError, ModelError
from forerun.models.hub import HubName, parse_hub_name
from forerun.models.load import load_checkpoint
from forerun.models.store import list_models, pull, remove

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/name_2.5", HubName("Org-1/name_2.5")),
        ("org/name:q4.gguf", HubName("org/name", "q4.gguf")),
        ("org/name/q4.gguf", HubName("org/name", "q4.gguf")),
        ("org/name/sub/q4.gguf", HubName("org/name", "sub/q4.gguf")),
        ("org/name/sub", None),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("../org/name", None),
        ("org/name:../x.gguf", None),
        ("folder/file.gguf", None),
        ("C:\\models\\x.gguf", None),
        ("", None),
    ],
)
def test_hub_names_are_told_from_paths(name: str, meaning: HubName | None) -> None:
    assert parse_hub_name(name) == meaning


class Hub:
    """Serves one repository, `org/name`, as far as huggingface_hub asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.token: str | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.answer(self, unquote(self.path.partition("?")[0]))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> None:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            siblings = [{"rfilename": str(file.relative_to(self.folder))} for file in self.files()]
            body = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False}
            return self.send(request, 200, json.dumps(body).encode(), {})
        if path.startswith("/api/models/org/name/tree/"):
            body = [self.entry(file) for file in self.files()]
            return self.send(request, 200, json.dumps(body).encode(), {})
        prefix = "/org/name/resolve/"
        file = self.folder / path.removeprefix(prefix).partition("/")[2]
        if path.startswith(prefix) and file.is_file():
            if request.command == "GET":
                self.fetched.append(file.name)
            headers = {"ETag": f'"{self.entry(file)["oid"]}"', "X-Repo-Commit": COMMIT}
            return self.send(request, 200, file.read_bytes(), headers)
        code = "EntryNotFound" if path.startswith(prefix) else "RepoNotFound"
        return self.send(request, 404, b"{}", {"X-Error-Code": code})

    def entry(self, file: Path) -> dict[str, Any]:
        digest = hashlib.sha1(file.read_bytes()).hexdigest()
        return {"type": "file", "path": str(file.relative_to(self.folder)), "size": file.stat().st_size, "oid": digest}

    def send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def hub(llama_folder: Path, llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = Path(shutil.copytree(llama_folder, tmp_path / "repository"))
    shutil.copy(llama_gguf, folder / "tiny.gguf")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"other")
    hub = Hub(folder)
    point_to(hub.url, monkeypatch)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


def test_a_repository_is_fetched_without_pickles_and_then_used_offline(hub: Hub, cache_dir: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    checkpoint = load_checkpoint("org/name", cache_dir=cache_dir, progress=lambda *step: seen.append(step))
    assert checkpoint.config.family == "llama"
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(hub.fetched) == wanted
    assert any(label == "fetching org/name" and total for label, _, total in seen)
    assert cache_dir / "hub" in checkpoint.path.parents
    hub.server.shutdown()
    again = load_checkpoint("org/name", cache_dir=cache_dir, offline=True)
    assert again.fingerprint == checkpoint.fingerprint


@pytest.mark.parametrize("name", ["org/name:tiny.gguf", "org/name/tiny.gguf"])
def test_one_gguf_file_of_a_repository_is_fetched_alone(name: str, hub: Hub, cache_dir: Path) -> None:
    entry = pull(name, cache_dir)
    assert hub.fetched == ["tiny.gguf"]
    assert entry.sha256 == hashlib.sha256((hub.folder / "tiny.gguf").read_bytes()).hexdigest()
    assert load_checkpoint(name, cache_dir=cache_dir, offline=True).source_kind == "gguf"
    assert [entry.name for entry in list_models(cache_dir)] == ["org/name"]
    assert remove("org/name", cache_dir) > entry.nbytes


def test_a_folder_is_pulled_without_a_hash(hub: Hub, cache_dir: Path) -> None:
    entry = pull("org/name", cache_dir)
    assert entry.sha256 is None
    assert entry.nbytes > (hub.folder / "model.safetensors").stat().st_size


def test_a_private_repository_needs_its_token(hub: Hub, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(ModelError, match="HF_TOKEN"):
        load_checkpoint("org/name", cache_dir=cache_dir)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert load_checkpoint("org/name", cache_dir=cache_dir).config.family == "llama"


@pytest.mark.parametrize(
    ("name", "named"), [("org/other", "no org/other"), ("org/name:other.gguf", r"has no file other\.gguf")]
)
def test_what_the_hub_does_not_have_is_named(name: str, named: str, hub: Hub, cache_dir: Path) -> None:
    with pytest.raises(ModelError, match=named):
        load_checkpoint(name, cache_dir=cache_dir)


@pytest.mark.parametrize("name", ["org/name", "org/name:tiny.gguf"])
@pytest.mark.parametrize("offline", [True, False])
def test_no_network_is_said_in_one_line(
    name: str, offline: bool, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(DownloadError, match="offline" if offline else "and the network") as caught:
        load_checkpoint(name, cache_dir=cache_dir, offline=offline)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(DownloadError, match="no space left"):
        load_checkpoint("org/name", cache_dir=cache_dir)


def test_a_repository_of_gguf_files_asks_for_one_of_them(hub: Hub, cache_dir: Path) -> None:
    (hub.folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"org/name:FILE\.gguf"):
        load_checkpoint("org/name", cache_dir=cache_dir)
