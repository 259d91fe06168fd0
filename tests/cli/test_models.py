"""`forerun models`: the cache folder as people and scripts see it."""

from pathlib import Path

import pytest

from forerun.cli.terminal import human_size
from forerun.models import store
from forerun.models.files import Progress
from tests.cli.conftest import Run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one alias in it, which holds five bytes."""
    import hashlib

    data = b"12345"
    alias = store.Alias("wheel==1", "x/tiny.gguf", hashlib.sha256(data).hexdigest(), len(data), 9)
    monkeypatch.setattr(store, "ALIASES", {"tiny": alias, "other": alias._replace(member="x/other.gguf")})
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(data)
    (folder / "tiny.gguf.sha256").write_text(alias.sha256)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path


def entry(cache: Path) -> dict[str, object]:
    path = cache / "models" / "tiny" / "tiny.gguf"
    return {"name": "tiny", "path": str(path), "bytes": 5, "sha256": store.ALIASES["tiny"].sha256}


def test_list_shows_what_is_there_and_what_can_be_had(run: Run, cache: Path) -> None:
    result = run("models", "list")
    assert result.status == 0
    assert result.out.split() == ["tiny", "5", "B", str(cache / "models" / "tiny" / "tiny.gguf")]
    assert "other" in result.err
    assert run("models", "list", "--json").json == [entry(cache)]


def test_an_empty_cache_is_said_to_be_empty(run: Run, cache: Path, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    result = run("models", "list", "--cache-dir", elsewhere)
    assert (result.status, result.out) == (0, "")
    assert f"no models in {elsewhere}" in result.err
    assert run("models", "list", "--json", "--cache-dir", elsewhere).json == []


def test_pull_returns_what_is_there_as_a_document(run: Run, cache: Path) -> None:
    result = run("models", "pull", "tiny", "--json")
    assert list(result.json) == ["name", "path", "bytes", "sha256"]
    assert result.json == entry(cache)
    assert run("models", "pull", "tiny").out.startswith("tiny  5 B  ")


def test_pull_shows_no_bars_where_stderr_is_no_terminal(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str, cache_dir: Path, progress: Progress) -> store.ModelEntry:
        progress("fetching", 1, 2)
        return store.ModelEntry(name, cache_dir, 2)

    monkeypatch.setattr(store, "pull", pull)
    result = run("models", "pull", "org/name")
    assert (result.status, result.err) == (0, "")


def test_rm_frees_space_and_refuses_what_is_not_there(run: Run, cache: Path) -> None:
    freed = run("models", "rm", "tiny", "--json").json
    assert freed["name"] == "tiny"
    assert freed["bytes"] >= 5
    assert not (cache / "models" / "tiny").exists()
    again = run("models", "rm", "tiny")
    assert again.status == 2
    assert len(again.err.splitlines()) == 1


def test_sizes_are_read_by_people() -> None:
    assert [human_size(n) for n in (0, 999, 1000, 98_362_432, 99_960_000, 1_234_567_890)] == [
        "0 B", "999 B", "1.0 KB", "98.4 MB", "100 MB", "1.2 GB",
    ]  # fmt: skip
