"""Installing from the source distribution where no kernels can be compiled: it succeeds, and runs on numpy."""

import os
import subprocess
import tarfile
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.families import save_hf, write_gguf

ROOT = Path(__file__).parents[2]
GENERATE = """
import sys, warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from forerun import LLM, SamplingParams
    texts = {LLM(sys.argv[1], drafter=drafter).generate([1, 2, 3], SamplingParams(max_tokens=8)).token_ids
             for drafter in ("none", "ngram")}
print(len(texts), sum("without its C++ kernels" in str(warning.message) for warning in caught))
"""

pytestmark = pytest.mark.slow


class Place:
    """A virtual environment with the tools to build with, beside an unpacked source distribution."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"
        venv.create(folder / "venv", with_pip=True)
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        tools = self.run("-m", "pip", "install", "-q", "scikit-build-core>=0.11", "nanobind>=2.4", check=False)
        if tools.returncode:
            pytest.skip("pip can't install scikit-build-core and nanobind here: " + tools.stderr[-300:])
        code = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder / 'dist')!r})"
        self.run("-c", code, cwd=ROOT)
        (archive,) = (folder / "dist").glob("forerun-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (unpacked,) = (path for path in folder.glob("forerun-*") if path.is_dir())
        unpacked.rename(self.source)
        site = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        self.package = site / "forerun"
        (site / "what-forerun-needs.pth").write_text(str(Path(np.__file__).parents[1]))

    def run(
        self, *arguments: str, cwd: Path | None = None, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
        command = [str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)
        assert not check or done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done

    def install(self, **variables: str) -> None:
        options = ["--no-deps", "--no-build-isolation", "--force-reinstall"]
        self.run("-m", "pip", "install", "-q", *options, str(self.source), **variables)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("install"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_gguf("llama", save_hf("llama", folder / "llama"), folder / "tiny.gguf", quant="Q8_0")
    return folder / "tiny.gguf"


def test_the_source_distribution_holds_what_a_build_needs(place: Place) -> None:
    for path in [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", *(ROOT / "src/forerun/native").iterdir()]:
        assert (place.source / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("trouble", ["no compiler", "a compile error"])
def test_without_compiled_kernels_it_installs_warns_once_and_writes_text(
    place: Place, model: Path, trouble: str
) -> None:
    broken = place.source / "src/forerun/native/pack.cpp"
    source = broken.read_text()
    try:
        if trouble == "no compiler":
            place.install(CC="/bin/false", CXX="/bin/false")
        else:
            broken.write_text('#error "as on a machine with too old a compiler"\n')
            place.install()
    finally:
        broken.write_text(source)
    names = {path.suffix for path in place.package.rglob("*") if path.is_file()}
    assert ".py" in names
    assert not names & {".cpp", ".h", ".so", ".pyd"}
    assert place.run("-c", GENERATE, str(model)).stdout.split() == ["1", "1"]  # one text, one warning
