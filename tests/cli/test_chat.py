"""`forerun chat`: turns, commands, a full context, and Ctrl-C, which stops the answer and not the program."""

import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forerun.engine.llm import Conversation
from tests.cli import toy
from tests.cli.conftest import Run
from tests.cli.toy import SlowSession

CHAT = ("chat", "--max-tokens", "30")


def test_a_pipe_brings_one_turn_a_line_and_answers_go_to_stdout(run: Run, session: SlowSession) -> None:
    result = run(*CHAT, stdin="Hello\n\nAnd you?\n")
    assert result.status == 0
    assert "\x1b" not in result.out
    first = run("generate", "Hello", "--max-tokens", "30").out
    assert result.out.startswith(first)
    assert len(result.out) == len(first) + 31


def test_a_new_turn_reads_only_what_is_new(run: Run, session: SlowSession) -> None:
    run(*CHAT, "--drafter", "none", stdin="x" * 500 + "\n")
    first, session.num_rows = session.num_rows, 0
    run(*CHAT, "--drafter", "none", stdin="x" * 500 + "\nAnd you?\n")
    assert first > 500
    assert session.num_rows - first < 100


def test_what_a_stop_string_cut_off_is_not_read_again(
    run: Run, session: SlowSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    encode = Conversation._encode

    def spy(self: Conversation) -> Any:
        text, ids = encode(self)
        seen.append((text, self._llm.tokenizer.encode(text), list(ids)))
        return text, ids

    monkeypatch.setattr(Conversation, "_encode", spy)
    stop = run("generate", "Hello", "--max-tokens", "30").out[5:8]
    run(*CHAT, "--stop", stop, stdin="Hello\nAnd you?\n")
    assert stop not in seen[1][0]
    assert seen[1][1] == seen[1][2]


def test_the_system_message_is_set_and_removed_and_the_turns_can_be_forgotten(
    run: Run, session: SlowSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    encode = Conversation._encode

    def spy(self: Conversation) -> Any:
        seen.append([f"{message['role'][0]}:{message['content'][:8]}" for message in self.messages])
        return encode(self)

    monkeypatch.setattr(Conversation, "_encode", spy)
    lines = ["A", "/system Be brief", "B", "/reset", "C", "/system", "/reset", "D"]
    result = run(*CHAT, "--system", "first", stdin="\n".join(lines))
    answer = seen[1][2]
    assert seen[0] == ["s:first", "u:A"]
    assert seen[1] == ["s:Be brief", "u:A", answer, "u:B"]
    assert seen[2] == ["s:Be brief", "u:C"]
    assert seen[3] == ["u:D"]
    assert "(there is no system message)" in result.err


def test_commands_answer_on_stderr_and_exit_leaves(run: Run, session: SlowSession) -> None:
    result = run("chat", stdin="/help\n/nonsense\n/stats\n/exit\nHello\n")
    assert (result.status, result.out) == (0, "")
    assert "/system TEXT" in result.err
    assert "there is no /nonsense" in result.err
    assert "tokens a round" in result.err


def test_a_path_is_no_command(run: Run, session: SlowSession) -> None:
    assert len(run(*CHAT, stdin="/etc/passwd holds what?\n").out) == 31


def test_stats_count_all_answers(run: Run, session: SlowSession) -> None:
    result = run("chat", "--max-tokens", "20", "--ignore-eos", stdin="A\nB\n/stats\n")
    shown = [line.split() for line in result.err.splitlines()]
    assert ["answers", "2"] in shown
    assert ["tokens", "40"] in shown
    assert result.err.count("(cut after 20 tokens; --max-tokens sets how many)") == 2


def test_a_full_context_forgets_the_oldest_turns_and_says_so(run: Run, session: SlowSession) -> None:
    toy.install(max_len=200)
    result = run(*CHAT, stdin="\n".join(["This is a turn of some length"] * 6))
    assert result.status == 0
    assert result.err.count("(the context is full: the oldest turn is forgotten)") == 4
    assert len(result.out.splitlines()) >= 6


def test_a_message_that_can_never_fit_is_an_error(run: Run, session: SlowSession) -> None:
    result = run(*CHAT, stdin="x" * 3000 + "\n")
    assert result.status == 2
    assert result.err.startswith("forerun: error: the message has 3")


def test_a_model_without_a_template_is_refused(run: Run, session: SlowSession) -> None:
    toy.install(template=False)
    result = run("chat", stdin="Hello\n")
    assert result.status == 2
    assert "chat template" in result.err


class Screen:
    """The far end of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> None:
        deadline = time.monotonic() + 30
        while text not in self.text[after:]:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.text!r}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self.read()

    def read(self) -> None:
        try:
            self.text += os.read(self._descriptor, 65536).decode(errors="replace")
        except OSError:  # the program has left
            time.sleep(0.05)


@pytest.fixture
def terminal(start: Any) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """`forerun chat` on a slow toy in a terminal of its own."""
    ours, theirs = pty.openpty()
    args = ("chat", "--max-tokens", "1500", "--ignore-eos", "--drafter", "none")

    def own_terminal() -> None:
        os.setsid()
        import fcntl

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = start(
        *args,
        env={"TOY_DELAY_S": "0.02", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=own_terminal,
    )
    os.close(theirs)
    yield process, Screen(ours)
    os.close(ours)


def test_ctrl_c_stops_the_answer_and_twice_at_the_prompt_the_program(
    terminal: tuple[subprocess.Popen[bytes], Screen],
) -> None:
    process, screen = terminal
    screen.wait_for("Ctrl-D to leave")
    screen.wait_for("drafted and accepted")  # the legend
    screen.wait_for("> ")
    screen.type("Hello\n")
    start = len(screen.text)
    while len(screen.text) < start + 40:
        screen.wait_for("\n", after=start)
        screen.read()
    screen.type("\x03")
    screen.wait_for("(stopped)")
    screen.wait_for("> ", after=screen.text.index("(stopped)"))

    screen.type("/stats\n")  # the program is alive, and the conversation goes on from what was said
    screen.wait_for("tokens a round")
    start = len(screen.text)
    screen.type("Go on\n")
    while len(screen.text) < start + 60:
        screen.read()
    screen.type("\x03")
    screen.wait_for("(stopped)", after=start)
    screen.wait_for("> ", after=screen.text.index("(stopped)", start))

    start = len(screen.text)
    screen.type("\x03")
    screen.wait_for("Ctrl-C again to leave", after=start)
    assert process.poll() is None
    screen.type("\x03")
    assert process.wait(10) == 0


def test_ctrl_d_leaves(terminal: tuple[subprocess.Popen[bytes], Screen]) -> None:
    process, screen = terminal
    screen.wait_for("> ")
    screen.type("\x04")
    assert process.wait(10) == 0


def test_what_was_said_before_ctrl_c_stays_in_the_conversation(
    run: Run, session: SlowSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    stream = Conversation.stream

    def interrupt(self: Conversation, text: str, params: Any = None) -> Any:
        heard.append(" ".join(message["content"] for message in self.messages if message["role"] == "assistant"))
        for i, piece in enumerate(stream(self, text, params)):
            yield piece
            if i == 5 and text == "Hello":
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Conversation, "stream", interrupt)
    result = run(*CHAT, "--drafter", "none", "--color", "never", stdin="Hello\nAnd?\n")
    assert result.status == 0
    assert "(stopped)" in result.err
    assert len(heard[1]) == 6
    assert result.out.startswith(heard[1])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
