"""Every mistake ends with one line and status 2; nothing that goes wrong shows a traceback unless it is asked for."""

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import app
from forerun.engine.llm import LLM
from forerun.errors import EngineError
from tests.cli.conftest import Result, Run
from tests.cli.toy import SlowSession


def assert_one_line(result: Result, status: int = 2) -> str:
    assert result.status == status
    assert result.out == ""
    assert result.err.startswith("forerun: error: ")
    assert len(result.err.splitlines()) == 1
    assert "Traceback" not in result.err
    return result.err


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--temperature", "abc"], "Invalid value for '--temperature'"),
        (["--max-tokens", "1.5"], "Invalid value for '--max-tokens'"),
        (["--temprature", "1"], "--temprature"),
        (["--stop"], "'--stop' requires an argument"),
        (["one", "two"], "two"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0"),
        (["--logprobs", "-1", "--json"], "logprobs is -1"),
        (["--logprobs", "5"], "--json"),
        (["--k", "many"], "k is 'many'; expected auto or a whole number"),
        (["--k", "-1"], "k is '-1'"),
        (["--k", "65"], "k is 65"),
        (["--verify", "hope"], "verify is 'hope'; expected one of block, token, coupled"),
        (["--dtype", "fp8"], "dtype is 'fp8'; expected one of auto, fp32, bf16, fp16, q8, q4"),
        (["--backend", "gpu"], "backend is 'gpu'; expected one of auto, cpu, torch"),
        (
            ["--backend", "cpu", "--dtype", "fp32"],
            "dtype is 'fp32'; backend cpu has auto, bf16, q8, q4, --backend torch",
        ),
        (["--backend", "torch", "--dtype", "q4"], "dtype is 'q4'; backend torch has auto, fp32, bf16, fp16, --backend"),
        (["--backend", "cpu", "--device", "cuda"], "device is 'cuda'; backend cpu runs on the cpu only"),
        (["--dtype", "q8", "--device", "cuda"], "device is 'cuda'; dtype q8 runs on the cpu only"),
        (["--drafter", "oracle"], "drafter is 'oracle'; expected one of auto, none, ngram, suffix"),
        (["--threads", "0"], "threads is 0"),
        (["--color", "pink"], "--color is 'pink'; expected auto, always or never"),
        (["--logit-bias", "12"], "--logit-bias is '12'; expected ID=BIAS"),
        (["--logit-bias", "{12}"], "--logit-bias is '{12}'"),
        (["--template-arg", "x"], "--template-arg is 'x'; expected KEY=VALUE"),
        (["--template-arg", "messages=[]"], "--template-arg"),
        (["--raw", "--system", "x"], "--raw leaves out the chat template"),
        (["--compare", "--record", "x"], "--compare and --record"),
        (["--prompts", "x.jsonl"], "--prompts and PROMPT"),
    ],
)
def test_an_impossible_option_is_refused_by_name(
    run: Run, session: SlowSession, args: list[str], complaint: str
) -> None:
    prompt = [] if args == ["one", "two"] else ["Hello"]
    assert complaint in assert_one_line(run("generate", *prompt, *args))
    assert session.num_rows == 0


def test_an_unknown_command_is_refused_by_name(run: Run) -> None:
    assert "oracle" in assert_one_line(run("oracle"))


def test_a_prompt_is_asked_for(run: Run) -> None:
    assert "no prompt" in assert_one_line(run("generate"))
    assert "standard input is empty" in assert_one_line(run("generate", stdin="\n"))
    assert "not UTF-8" in assert_one_line(run("generate", stdin=b"\xff\xfe"))


def test_a_prompt_longer_than_the_context_is_refused(run: Run, session: SlowSession) -> None:
    error = assert_one_line(run("generate", "long " * 500))
    assert "the prompt has 25" in error
    assert "2048" in error


def test_models_that_are_not_there_or_damaged_or_unknown_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0\x05")
    (tmp_path / "not.gguf").write_bytes(b"nothing of the kind")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["X"]}))
    for name, complaint in (
        ("no such model", "no model 'no such model'"),
        (str(tmp_path / "none.gguf"), "none.gguf"),
        (str(tmp_path / "cut.gguf"), "cut.gguf"),
        (str(tmp_path / "not.gguf"), "not.gguf"),
        (str(tmp_path / "strange"), "mamba"),
        (str(tmp_path), "config.json"),
    ):
        assert complaint in assert_one_line(run("generate", "Hello", "--target", name))


def test_without_a_network_a_download_ends_in_one_line_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for args in (["generate", "Hello"], ["models", "pull", "smollm2-135m"]):
        assert "smollm2-135m" in assert_one_line(run(*args, "--cache-dir", str(tmp_path / "cache")))
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "offline" in assert_one_line(run("generate", "Hello", "--offline", "--cache-dir", str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (EngineError("the net is torn"), 1, "the net is torn"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device; free some"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "/x: Permission denied"),
        (MemoryError(), 2, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "out of memory"),
        (ValueError("two\nlines"), 1, "internal error: ValueError: two lines; FORERUN_DEBUG=1"),
    ],
)
def test_each_kind_of_failure_has_its_status_and_one_line(
    run: Run, session: SlowSession, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, message: str
) -> None:
    def fail(*_args: Any, **_settings: Any) -> Any:
        raise error

    monkeypatch.setattr(LLM, "submit", fail)
    assert message in assert_one_line(run("generate", "Hello"), status)
    monkeypatch.setenv("FORERUN_DEBUG", "1")
    debugged = run("generate", "Hello")
    assert debugged.status == status
    assert "Traceback" in debugged.err


def test_ctrl_c_ends_with_130_and_silence(run: Run, session: SlowSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: Any, **_settings: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "submit", interrupt)
    assert run("generate", "Hello") == Result(130, "", "")


def test_ctrl_c_during_an_answer_keeps_what_was_written(start: Any) -> None:
    args = ("generate", "Hello", "--max-tokens", "1900", "--ignore-eos")
    process = start(*args, env={"TOY_DELAY_S": "0.02"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"")
    assert len(first + out) < 1900
    assert out.endswith(b"\n")


def test_a_closed_pipe_is_no_error(start: Any) -> None:
    args = ("generate", "Hello", "--max-tokens", "1900", "--ignore-eos")
    process = start(*args, env={"TOY_DELAY_S": "0.01"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(5)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", [("generate", "Hello"), ("generate", "Hello", "--json"), ("--version",), ("--help",)])
def test_a_full_disk_is_one_line(start: Any, args: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        process = start(*args, stdout=full, stderr=subprocess.PIPE)
        lines = process.stderr.read().decode().splitlines()
        assert process.wait(20) == 2
    assert lines[-1] == "forerun: error: No space left on device; free some and try again"
    assert not any("Traceback" in line or "Exception" in line for line in lines)


def test_a_stdout_that_was_closed_before_is_no_error() -> None:
    command = f"{sys.executable} -m forerun --version >&-"
    assert subprocess.run(command, shell=True, capture_output=True, check=True).stderr == b""


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from forerun.cli import main; status = main([sys.argv[1]]); "
        "heavy = {'numpy', 'torch', 'transformers', 'tokenizers', 'huggingface_hub', 'jinja2'} & set(sys.modules); "
        "print(sorted(heavy)); sys.exit(status)"
    )
    for option in ("--version", "--help"):
        shown = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True)
        assert shown.stdout.splitlines()[-1] == "[]"


def test_it_runs_as_a_module_and_starts_fast() -> None:
    fastest = 99.0
    for _ in range(3):
        start = time.perf_counter()
        shown = subprocess.run(
            [sys.executable, "-m", "forerun", "--version"], capture_output=True, text=True, check=True
        )
        fastest = min(fastest, time.perf_counter() - start)
    assert shown.stdout.startswith("forerun ")
    assert fastest < 2  # 0.15 s where nothing else runs


def test_no_arguments_show_the_help(run: Run) -> None:
    result = run()
    assert result.status == 0
    for command in ("generate", "chat", "bench", "models"):
        assert command in result.out


def test_what_is_out_of_memory_is_told_by_its_name() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch names it."""

    assert app._explain(OutOfMemoryError("CUDA"))[0] == 2
