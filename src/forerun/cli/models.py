"""`forerun models`: what is in the cache folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.terminal import human_size, note, print_json, progress_bars

if TYPE_CHECKING:
    from forerun.models.store import ModelEntry

models = typer.Typer(name="models", help="List, fetch and remove models.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="An alias or a hub id.")]
_CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where models are kept.", metavar="DIR", envvar="FORERUN_CACHE")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line of stdout.")]


@models.command("list")
def list_(cache_dir: _CacheDir = None, as_json: _Json = False) -> None:
    """List the models that are here, and the aliases that can be fetched."""
    from forerun.models.store import ALIASES, list_models

    folder = _folder(cache_dir)
    entries = list_models(folder)
    if as_json:
        print_json([_as_dict(entry) for entry in entries])
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        print(f"{entry.name:<{width}}  {human_size(entry.nbytes):>8}  {entry.path}")
    absent = [name for name in ALIASES if name not in {entry.name for entry in entries}]
    if not entries:
        note(f"no models in {folder}")
    if absent:
        note(f"can be fetched with forerun models pull: {', '.join(absent)}, or any hub id")


@models.command()
def pull(name: _Name, cache_dir: _CacheDir = None, as_json: _Json = False) -> None:
    """Fetch a model, so that it is there offline."""
    from forerun.models.store import pull as pull_model

    with progress_bars() as progress:
        entry = pull_model(name, _folder(cache_dir), progress)
    if as_json:
        print_json(_as_dict(entry))
        return
    print(f"{entry.name}  {human_size(entry.nbytes)}  {entry.path}")


@models.command()
def rm(name: _Name, cache_dir: _CacheDir = None, as_json: _Json = False) -> None:
    """Remove a model from the cache folder."""
    from forerun.models.store import remove

    freed = remove(name, _folder(cache_dir))
    if as_json:
        print_json({"name": name, "bytes": freed})
        return
    print(f"removed {name}, {human_size(freed)} freed")


def _folder(given: Path | None) -> Path:
    from forerun.models.store import default_cache_dir

    return given.expanduser() if given else default_cache_dir()


def _as_dict(entry: "ModelEntry") -> dict[str, Any]:
    return {"name": entry.name, "path": str(entry.path), "bytes": entry.nbytes, "sha256": entry.sha256}
