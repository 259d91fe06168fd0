"""`forerun chat`: a conversation in the terminal, or one turn a line from a pipe."""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.options import ModelOptions, SamplingOptions, ShowOptions, TemplateOptions, with_options
from forerun.cli.terminal import Writer, legend, note, progress_bars, use_color
from forerun.errors import EngineError, ForerunError, UserError
from forerun.types import Output, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

_HELP = """\
/system TEXT   set the system message, or remove it where TEXT is missing; the turns stay
/reset         forget the turns
/stats         what speculation has done so far
/exit          leave; so do Ctrl-D, and Ctrl-C twice
Ctrl-C         stop the answer; what was said so far stays"""


@with_options
def chat(*, template: TemplateOptions, model: ModelOptions, sampling: SamplingOptions, show: ShowOptions) -> None:
    """Talk with a model; /help says what it understands besides."""
    started = perf_counter()
    params, config, template_args = sampling.params(), model.config(), template.template_args()
    color = use_color(show.color, sys.stdout)
    with progress_bars() as progress:
        from forerun.engine.llm import LLM

        llm = LLM(config, progress=progress)
    dialogue = Dialogue(llm, params, template.system, template_args, Writer(sys.stdout, color=color))
    with closing(llm):
        if sys.stdin.isatty():
            note(_greeting(llm, perf_counter() - started))
            if color:
                note(legend())
            _talk(dialogue, show_stats=show.stats)
            return
        status = 0
        for line in sys.stdin:
            try:
                if line.strip() and not dialogue.take(line.rstrip("\r\n"), show_stats=show.stats):
                    break
            except ForerunError as error:  # the turn fails, the next ones go on
                note(f"forerun: error: {error}")
                status = 2 if isinstance(error, UserError) else 1
    raise typer.Exit(status)


def _greeting(llm: "LLM", load_s: float) -> str:
    from forerun.cli.report import settings_line

    return f"{settings_line(llm.config)}\nready in {load_s:.1f} s; /help for help, Ctrl-D to leave"


def _talk(dialogue: "Dialogue", *, show_stats: bool) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing
    is_leaving = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if is_leaving:
                return
            is_leaving = True
            note("Ctrl-C again to leave")
            continue
        is_leaving = False
        try:
            if line.strip() and not dialogue.take(line, show_stats=show_stats):
                return
        except ForerunError as error:
            note(f"forerun: error: {error}")


class Dialogue:
    """A conversation and what is said about it."""

    def __init__(
        self, llm: "LLM", params: SamplingParams, system: str | None, template_args: Mapping[str, Any], writer: Writer
    ) -> None:
        self._llm = llm
        self._params = params
        self._writer = writer
        self._conversation = llm.conversation(system=system, params=params, **template_args)
        self._stats = SpeculationStats()
        self._decode_s = 0.0
        self._num_answers = 0

    def take(self, line: str, *, show_stats: bool) -> bool:
        """Answer a line or obey a command; return False to leave. Raises ForerunError."""
        command, _, rest = line.strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _rest: note(_HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/stats": lambda _rest: self._show_stats(),
        }
        if command in ("/exit", "/quit"):
            return False
        if command in commands:
            commands[command](rest.strip())
        elif command.startswith("/") and command[1:].isalpha():
            note(f"there is no {command}; /help says what there is")
        else:
            self._answer(line, show_stats=show_stats)
        return True

    def _answer(self, text: str, *, show_stats: bool) -> None:
        forgotten = self._conversation.num_forgotten
        output = None
        with _stopped_by_ctrl_c(self._llm):
            try:
                for piece in self._conversation.stream(text):
                    if self._conversation.num_forgotten > forgotten:
                        note(_forgotten(self._conversation.num_forgotten - forgotten))
                        forgotten = self._conversation.num_forgotten
                    self._writer.write(piece.spans)
                    output = piece.output
            except KeyboardInterrupt:
                self._writer.end_line()
                note("(stopped)")
                return
            finally:
                self._writer.end_line()
        assert output is not None
        self._count(output)
        if output.finish_reason == "error":
            raise EngineError(f"the answer failed: {output.error}")
        if output.finish_reason == "length":
            note(f"(cut after {output.completion_tokens} tokens; --max-tokens sets how many)")
        if show_stats:
            self._show_stats()

    def _count(self, output: Output) -> None:
        self._stats += output.speculation
        self._decode_s += output.decode_s
        self._num_answers += 1

    def _reset(self, _rest: str) -> None:
        self._conversation.reset()
        note("(the turns are forgotten)")

    def _set_system(self, text: str) -> None:
        messages = self._conversation.messages
        messages[:] = [message for message in messages if message["role"] != "system"]
        if text:
            messages.insert(0, {"role": "system", "content": text})
        note("(the system message is set)" if text else "(there is no system message)")

    def _show_stats(self) -> None:
        from forerun.cli.report import show_stats

        speed = (self._stats.emitted - self._num_answers) / self._decode_s if self._decode_s else None
        rows = [
            ("answers", f"{self._num_answers}"),
            ("tokens", f"{self._stats.emitted}"),
            ("decode", f"{self._decode_s:.2f} s" + (f", {speed:.1f} tokens/s" if speed else "")),
        ]
        show_stats(self._stats, rows)


def _forgotten(num_messages: int) -> str:
    turns = "the oldest turn is" if num_messages == 1 else f"the {num_messages} oldest turns are"
    return f"(the context is full: {turns} forgotten)"


@contextmanager
def _stopped_by_ctrl_c(llm: "LLM") -> Iterator[None]:
    """Turn Ctrl-C into a KeyboardInterrupt between two rounds, never within one: the caches stay in order."""
    run_round, is_stopping = llm.step, False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    def step() -> None:
        if is_stopping:
            raise KeyboardInterrupt
        run_round()

    before = signal.signal(signal.SIGINT, stop)
    llm.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm.step  # the instance's: the method of the class is back
        signal.signal(signal.SIGINT, before)
