"""Fetching models from the hub, with huggingface_hub: its cache layout, its tokens (HF_TOKEN), its mirrors."""

import errno
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

from forerun.errors import DownloadError, ModelError
from forerun.models.files import Progress, disk_error

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]  # never a pickle
_UNWANTED = ["*/*.json", "*/*.safetensors", "consolidated*"]  # other formats of the same weights
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:[:/](?P<file>[^:]+\.gguf))?")


class HubName(NamedTuple):
    """A repository on the hub, or one GGUF file in it."""

    repo: str  # org/name
    file: str | None = None


def parse_hub_name(name: str) -> HubName | None:
    """Return what `name` means on the hub, None if it can't be a hub id."""
    match = _NAME.fullmatch(name)
    if match is None or match["repo"].endswith(".gguf") or ".." in name:
        return None
    return HubName(match["repo"], match["file"])


def fetch_hub(name: HubName, hub_dir: Path, *, offline: bool, progress: Progress) -> Path:
    """Return the folder of a repository's snapshot, or its GGUF file, fetched as far as it isn't in `hub_dir`.

    Without a network, what was fetched before is used. Raises DownloadError or ModelError.
    """
    import huggingface_hub

    bar = _progress_bar(f"fetching {name.repo}", progress)
    wanted, unwanted = (_WANTED, _UNWANTED) if name.file is None else ([name.file], [])
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name.repo,
                cache_dir=hub_dir,
                local_files_only=offline,
                allow_patterns=wanted,
                ignore_patterns=unwanted,
                tqdm_class=bar,
            )
        )
    except Exception as error:  # of several libraries, without a common base
        raise _explained(name, hub_dir, offline, error) from error
    if name.file is None:
        return folder
    if not (folder / name.file).is_file():
        raise ModelError(f"{name.repo} has no file {name.file}, or it was never fetched: check the name")
    return folder / name.file


def _explained(name: HubName, hub_dir: Path, offline: bool, error: Exception) -> DownloadError | ModelError:
    """Return the one line that says why `name` could not be fetched, and what to do."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return DownloadError(f"{name.repo} asks for consent: give it on the model's page, then set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"there is no folder {name.repo}, and the hub has no {name.repo}, or it is private: "
            "check the name, or set HF_TOKEN"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        if offline:
            return DownloadError(f"{name.repo} is not complete in {hub_dir} and offline was asked for: fetch it once")
        return DownloadError(
            f"there is no folder {name.repo}, it is not complete in {hub_dir}, and the hub can't be reached: "
            "check the name and the network"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return disk_error(name.repo, hub_dir, error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return DownloadError(f"can't fetch {name.repo}: {lines[0][:300]}")


def _progress_bar(label: str, progress: Progress) -> type:
    """Return a tqdm class that reports bytes to `progress` and draws nothing."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                progress(label, int(self.n), int(self.total))
            return shown

    return Bar
