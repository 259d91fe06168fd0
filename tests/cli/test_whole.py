"""The command line on real nets: files of tiny random ones, and the demo model where it has been fetched."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.models.store import default_cache_dir, list_models
from tests.cli.conftest import Run

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from tests.families import save_hf, tiny_model, write_gguf

    folder = tmp_path_factory.mktemp("models")
    (folder / "llama").mkdir()
    save_hf("llama", folder / "llama")
    write_gguf("llama", tiny_model("llama"), folder / "tiny.gguf")
    return folder


def test_a_folder_and_a_gguf_write_one_text_with_and_without_a_draft_model(run: Run, folder: Path) -> None:
    args = ("generate", "the cat", "--json", "--dtype", "fp32", "--max-tokens", "40", "--ignore-eos")
    plain = run(*args, "--target", str(folder / "llama"), "--drafter", "none")
    assert plain.status == 0
    assert len(plain.json["token_ids"]) == 40
    for target, drafter in (("llama", f"lm:{folder / 'tiny.gguf'}"), ("tiny.gguf", "ngram")):
        answer = run(*args, "--target", str(folder / target), "--drafter", drafter).json
        assert answer["token_ids"] == plain.json["token_ids"]
        assert answer["speculation"]["drafter"] == drafter
    config = answer["config"]
    assert (config["dtype"], config["device"]) == ("fp32", "cpu")


def test_a_truncated_file_is_one_line(run: Run, folder: Path, tmp_path: Path) -> None:
    data = (folder / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (len(data) - 1000, len(data) // 3, 50):
        cut.write_bytes(data[:size])
        result = run("generate", "Hello", "--target", str(cut))
        assert (result.status, result.out, len(result.err.splitlines())) == (2, "", 1)
        assert "cut.gguf" in result.err


def test_chat_keeps_its_caches_on_a_real_net(run: Run, folder: Path) -> None:
    result = run(
        "chat", "--target", str(folder / "llama"), "--max-tokens", "20", "--stats", stdin="the cat\nand the hat\n"
    )
    assert result.status == 0
    assert "answers" in result.err


@pytest.mark.slow
@pytest.mark.skipif(
    not any(entry.name == "smollm2-135m" for entry in list_models(default_cache_dir())),
    reason="the demo model has not been fetched",
)
def test_the_demo_model_answers(run: Run) -> None:
    result = run(
        "generate", "What is the capital of France?", "--json", "--max-tokens", "24", "--offline", "--dtype", "bf16"
    )
    assert result.status == 0
    assert "Paris" in result.json["text"]
