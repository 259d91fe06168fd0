"""The direction of imports, by reading the sources: arrows only point from left to right, and torch has its places."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "forerun"
ORDER = [
    "cli",
    "serve",
    "train",
    "bench",
    "engine",
    "drafters",
    "backends",
    "models",
    "sampling",
    "config",
    "types",
    "errors",
]
TORCH_PLACES = ("backends/torch", "backends/transformers", "train/", "bench/peers")
WHOLE = {"__init__", "__main__"}  # the package's own face may import anything below the command line
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def imported(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def package(module: str) -> str:
    return module.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_point_right(module: str) -> None:
    own = package(module)
    if own in WHOLE:
        return
    for name in imported((ROOT / module).read_text()):
        parts = name.split(".")
        if parts[0] == "forerun" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) >= ORDER.index(own), f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_torch_and_transformers_stay_in_their_places(module: str) -> None:
    if module.startswith(TORCH_PLACES):
        return
    roots = {name.split(".")[0] for name in imported((ROOT / module).read_text())}
    assert not roots & {"torch", "transformers"}, module


def test_every_package_of_the_source_tree_has_its_place_in_the_order() -> None:
    assert {package(module) for module in MODULES} <= set(ORDER) | WHOLE
