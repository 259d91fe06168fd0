"""`LLM`: a target with its drafter, text in and text out. This is the layer with a tokenizer and a clock."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, NamedTuple, overload

from forerun import __version__
from forerun.backends.base import Session
from forerun.backends.open import load_model, open_session
from forerun.config import Config, available_cores, processor_name
from forerun.drafters.base import Drafter
from forerun.drafters.build import Parts, build, drafter_names
from forerun.drafters.suffix import Past
from forerun.engine.controller import Controller, Estimates
from forerun.engine.costs import CostTable, measure_choices, measured
from forerun.engine.engine import Engine
from forerun.engine.policy import Fixed, Policy
from forerun.engine.round import Span
from forerun.engine.sequence import Event, Request
from forerun.engine.text import TextStream
from forerun.errors import EngineError, OptionError, RequestError
from forerun.models.load import ForeignFolder
from forerun.models.store import default_cache_dir
from forerun.models.tokenizer import Tokenizer
from forerun.models.weights import Checkpoint
from forerun.sampling import kernels
from forerun.types import Output, Piece, SamplingParams, SpeculationStats, TokenLogprob, TokenTrace

Messages = Sequence[Mapping[str, Any]]  # {"role": …, "content": …}, oldest first
Prompt = str | Messages | Sequence[int]
Progress = Callable[[str, int, int | None], None]  # what, how much is done, of how much


class LLM:
    """A target model and its drafter.

    A string is a user's turn where the model has a chat template, plain text where it has none or where `raw` is set.
    Lists of messages go through the template; lists of token ids are taken as they are.
    """

    def __init__(
        self,
        target: str | Config,
        *,
        drafter: str | None = None,
        k: int | Literal["auto"] | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are the fields of `Config`. Raises OptionError, ModelError, DownloadError."""
        given = {name: value for name, value in {"drafter": drafter, "k": k, **settings}.items() if value is not None}
        try:
            config = replace(target, **given) if isinstance(target, Config) else Config(target, **given)
        except TypeError as error:
            unknown = sorted(set(given) - {field.name for field in fields(Config)})
            known = ", ".join(field.name for field in fields(Config))
            raise OptionError(f"unknown setting {', '.join(unknown) or error}; expected some of {known}") from error
        names = drafter_names(config.drafter, is_controlled=config.k == "auto")
        config = replace(config, drafter="+".join(names))
        # more threads than cores wait for each other at every step
        config = replace(config, threads=min(config.threads or available_cores(), available_cores()))

        def open_model(
            checkpoint: Checkpoint | ForeignFolder, device: str, cache_tokens: int | None, dtype: str = config.dtype
        ) -> Session:
            return open_session(
                checkpoint,
                dtype=dtype,
                device=device,
                threads=config.threads,
                cache_tokens=cache_tokens,
                backend=config.backend,
            )

        def load(name: str) -> Checkpoint | ForeignFolder:
            return load_model(
                name, backend=config.backend, cache_dir=config.cache_dir, offline=config.offline, progress=progress
            )

        def open_draft_model(name: str | None, dtype: str | None = None) -> tuple[Checkpoint | ForeignFolder, Session]:
            checkpoint = load(name) if name else self.checkpoint
            device = config.drafter_device or config.device
            return checkpoint, open_model(checkpoint, device, None, dtype or config.dtype)

        self.checkpoint = load(config.target)
        self.session = open_model(self.checkpoint, config.device, config.cache_tokens)
        self.tokenizer: Tokenizer = self.checkpoint.tokenizer
        self.config = _resolved(config, self.session)
        if self.config.backend == "cpu":  # torch has threads of its own, which ours would get in the way of
            kernels.num_threads = self.config.threads or 1
        self._pasts: dict[Path, Past] = {}
        parts = Parts(self.checkpoint, self.session, open_draft_model, self._open_past)
        built = [build(name, parts) for name in names]
        self.drafters: list[Drafter] = [drafter for drafter in built if drafter is not None]
        self.estimates = Estimates()
        self._costs = self._measure_costs() if self.drafters and self._is_controlled else None
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.RLock()
        self.engine = self.new_engine()

    def _open_past(self, file: str | None) -> Past:
        """Return the past texts that a file has. Raises OptionError."""
        past = Past(vocabulary=self.tokenizer.fingerprint, vocab_size=self.session.vocab_size)
        if file is None:
            return past
        path = Path(file).expanduser().absolute()
        if path not in self._pasts:
            try:
                if path.exists():
                    past.load(path)
            except OSError as error:
                raise OptionError(f"can't read {path}: {error.strerror or error}") from error
            self._pasts[path] = past
        return self._pasts[path]

    def forget(self) -> None:
        """Let all drafters forget what they learned from texts that have ended, as if the model were just loaded."""
        for drafter in self.drafters:
            drafter.forget()

    def close(self) -> None:
        """End what still runs, forget what is kept, and write past texts to their files. Raises OptionError."""
        for job in list(self._jobs.values()):
            self.abort(job)
        self.engine.release_kept()
        for path, past in self._pasts.items():
            try:
                past.save(path)
            except OSError as error:
                raise OptionError(f"can't write {path}: {error.strerror or error}") from error

    def new_engine(self, *, span: Span | None = None) -> Engine:
        """Return a fresh engine over the same models; `span` is told when the stretches of a round begin and end."""
        policy: Policy = self._controller() if self._costs else Fixed(self.drafters[0] if self.drafters else None)
        return Engine(
            self.session,
            token_bytes=self.tokenizer.token_bytes,
            end_ids=self.tokenizer.eos_ids,
            k=policy.max_drafts if self.config.k == "auto" else self.config.k,
            verify=self.config.verify,
            max_running=self.config.max_running,
            prefill_rows=self.config.prefill_rows,
            policy=policy,
            span=span or (lambda _name: nullcontext()),
        )

    @property
    def _is_controlled(self) -> bool:
        return self.config.k == "auto" or len(self.drafters) > 1

    def _controller(self) -> Controller:
        assert self._costs
        return Controller(
            self.drafters,
            self._costs.target,
            draft_costs=self._costs.drafters,
            row_seconds=self._costs.rows,
            estimates=self.estimates,
            clock=perf_counter,
        )

    def _measure_costs(self) -> "_Costs":
        """Measure what passes cost, or read what was measured for models of this shape on this machine."""
        folder = (self.config.cache_dir or default_cache_dir()) / "costs"

        def table(session: Session, shape: Any) -> CostTable:
            names = ("backend", "dtype", "device", "instruction_set")
            key: dict[str, Any] = {name: str(getattr(session, name, "")) for name in names}
            key |= {"shape": shape, "threads": self.config.threads, "version": __version__, "machine": processor_name()}
            return measured(session, perf_counter, folder=folder, key=key)

        models: dict[str, Session] = {
            drafter.name: getattr(drafter.session, "model", drafter.session)
            for drafter in self.drafters
            if hasattr(drafter, "session")
        }
        return _Costs(
            table(self.session, repr(getattr(self.checkpoint, "config", None))),
            {
                name: table(session, [session.num_layers, session.vocab_size, getattr(session, "weight_bytes", 0)])
                for name, session in models.items()
            },
            measure_choices(self.session, perf_counter),
        )

    def encode(
        self, prompt: Prompt, *, raw: bool = False, template_args: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Return the token ids that a prompt stands for."""
        items: list[Any] = list(prompt)
        if isinstance(prompt, str):
            if raw or not self.tokenizer.chat_template:
                return tuple(self.tokenizer.encode_prompt(prompt))
            items = [{"role": "user", "content": prompt}]
        if all(isinstance(item, int) for item in items):
            return tuple(items)
        return tuple(self.tokenizer.encode_chat(items, **(template_args or {})))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] to the type checker
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Any: ...

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer one prompt (returns an Output) or many at once (returns a list of them, in order).

        Raises RequestError before anything runs if one of them can't be served. A failure on the way (a logits
        processor that raises, a law without a token left) raises EngineError for one prompt; of many, that Output
        has finish_reason "error" and the message in `error`, and the others are whole.
        """
        if not isinstance(prompts, Sequence) or len(prompts) == 0:
            raise RequestError(f"the prompt is {prompts!r}; expected text, messages, token ids, or a list of such")
        if _is_one_prompt(prompts):
            return _succeeded(self.generate([prompts], params, raw=raw, template_args=template_args)[0])
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(
                f"got {len(prompts)} prompts and {len(each)} sampling params; expected one for each, or one for all"
            )
        encoded = [self.encode(prompt, raw=raw, template_args=template_args) for prompt in prompts]
        jobs: list[_Job] = []
        try:
            for ids, own in zip(encoded, each, strict=True):
                jobs.append(self.submit(ids, own))
            while any(job.output is None for job in jobs):
                self.step()
        except BaseException:
            for job in jobs:
                self.abort(job)
            raise
        return [job.output for job in jobs]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Iterator[Piece]:
        """Yield an answer piece by piece, a round each; the last piece carries the Output. Closing it aborts."""
        return self.pieces(self.submit(self.encode(prompt, raw=raw, template_args=template_args), params))

    def conversation(
        self, *, system: str | None = None, params: SamplingParams | None = None, **template_args: Any
    ) -> "Conversation":
        """Start a conversation; the caches of both models are kept between its turns."""
        return Conversation(self, system=system, params=params, template_args=template_args)

    def submit(
        self, ids: Sequence[int], params: SamplingParams | None = None, *, keep: bool = False, resume: int | None = None
    ) -> "_Job":
        """Queue a request; `step` or `pieces` moves it on."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the sampling params are {params!r}; expected SamplingParams(…)")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        with self._lock:
            request_id = self.engine.add(Request(tuple(ids), params, seed=seed, keep=keep, resume=resume))
            job = _Job(request_id, len(ids), TextStream(self.tokenizer.token_bytes, params.stop))
            self._jobs[request_id] = job
        return job

    def pieces(self, job: "_Job") -> Iterator[Piece]:
        """Yield what a queued request writes."""
        try:
            while True:
                while not job.pieces:
                    self.step()
                piece = job.pieces.popleft()
                yield piece
                if piece.output is not None:
                    return
        finally:
            self.abort(job)

    def step(self) -> None:
        """Run one round of all queued requests and hand out what it brought."""
        with self._lock:
            try:
                events = self.engine.step()
            except Exception as error:  # the caches are in an unknown state: end all, start afresh
                self._fail_all(error)
                raise
            now = perf_counter()
            for event in events:
                self._deliver(event, now)

    def abort(self, job: "_Job") -> None:
        """End a request that still runs; its Output has what was written so far."""
        with self._lock:
            if job.output is None:
                event = self.engine.abort(job.request_id)
                if event is not None:
                    self._deliver(event, perf_counter())

    def _deliver(self, event: Event, now: float) -> None:
        job = self._jobs[event.request_id]
        job.add(event, now)
        if job.output is not None:
            del self._jobs[event.request_id]

    def _fail_all(self, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        for request_id in list(self._jobs):
            with suppress(Exception):
                self.engine.abort(request_id)
            event = Event(request_id, (), None, SpeculationStats(), "error", error=message)
            self._deliver(event, perf_counter())

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Conversation:
    """A dialogue whose turns share the caches of target and drafter: a new turn reads only what is new.

    When the context is full, the oldest turns are forgotten, the system message never; `num_forgotten` counts them.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not llm.tokenizer.chat_template:
            raise RequestError("this model has no chat template; use generate with raw text")
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        self.num_forgotten = 0
        self._llm = llm
        self._params = params or SamplingParams()
        self._template_args = dict(template_args or {})
        self._is_answering = False
        self._kept: int | None = None  # the engine's id of the last turn, whose caches are there
        self._past_text = ""  # what the model has seen and said, as text
        self._past_ids: tuple[int, ...] = ()  # and as tokens

    def say(self, text: str, params: SamplingParams | None = None) -> Output:
        """Say something and return the answer. Raises EngineError, and forgets the turn, if it failed on the way."""
        *_, last = self.stream(text, params)
        return _succeeded(last.output)

    def stream(self, text: str, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Say something and yield the answer piece by piece. If closed early, what was said so far stays."""
        params = params or self._params
        if self._is_answering:
            raise RequestError("an answer of this conversation is still being written; read it to its end or close it")
        self.messages.append({"role": "user", "content": text})
        try:
            prompt_text, ids = self._fit(params)
            job = self._llm.submit(ids, params, keep=True, resume=self._kept)
        except Exception:
            self.messages.pop()
            raise
        self._kept, self._is_answering = job.request_id, True
        try:
            yield from self._llm.pieces(job)
        finally:
            self._is_answering = False
            self._remember(prompt_text, ids, job.output)

    def _remember(self, prompt_text: str, ids: tuple[int, ...], output: Output | None) -> None:
        """Add an answer to the history; a turn that failed is forgotten."""
        assert output is not None
        if output.finish_reason == "error":
            self.messages.pop()
            self._kept, self._past_text, self._past_ids = None, "", ()
            return
        self.messages.append({"role": "assistant", "content": output.text})
        stopped = output.finish_reason == "stop" and output.token_ids[-1] in self._llm.tokenizer.eos_ids
        written = output.token_ids[:-1] if stopped else output.token_ids
        self._past_text, self._past_ids = prompt_text + output.text, (*ids, *written)
        if self._llm.tokenizer.decode(written) != output.text:  # a stop cut the text within what was written
            self._past_text, self._past_ids = "", ()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.close()
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def close(self) -> None:
        """Release the caches. The conversation can go on; it will be read again."""
        if self._kept is not None:
            with suppress(KeyError):
                self._llm.engine.release(self._kept)
        self._kept, self._past_text, self._past_ids = None, "", ()

    def _fit(self, params: SamplingParams) -> tuple[str, tuple[int, ...]]:
        """Return the prompt as text and ids, after forgetting as many of the oldest turns as it takes."""
        limit = self._llm.session.max_len
        reserve = min(params.max_tokens or limit // 4, limit // 2)  # room for an answer
        while True:
            text, ids = self._encode()
            if len(ids) + reserve <= limit:
                return text, ids
            first = 1 if self.messages[0]["role"] == "system" else 0
            if len(self.messages) - first <= 1:
                raise RequestError(
                    f"the message has {len(ids)} tokens; the context holds {limit}, "
                    f"of which {reserve} are kept for the answer: shorten it"
                )
            del self.messages[first : first + 2]
            self.num_forgotten += 1

    def _encode(self) -> tuple[str, tuple[int, ...]]:
        """Encode the conversation; where it goes on from what was written, those very tokens are kept."""
        tokenizer = self._llm.tokenizer
        text = tokenizer.apply_chat_template(self.messages, **self._template_args)
        if self._past_ids and text.startswith(self._past_text):
            return text, (*self._past_ids, *tokenizer.encode(text[len(self._past_text) :]))
        return text, tuple(tokenizer.encode_chat(self.messages, **self._template_args))


class _Job:
    """A request with its text and its times."""

    def __init__(self, request_id: int, num_prompt: int, text: TextStream) -> None:
        self.request_id = request_id
        self.pieces: deque[Piece] = deque()
        self.output: Output | None = None
        self._num_prompt = num_prompt
        self._text = text
        self._tokens: list[TokenTrace] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._stats = SpeculationStats()
        self._started_s = perf_counter()
        self._first_s: float | None = None
        self._last_s = self._started_s

    def add(self, event: Event, now: float) -> None:
        if event.tokens:
            self._first_s = now if self._first_s is None else self._first_s
            self._last_s = now
        self._tokens += event.tokens
        self._stats = self._stats + event.stats
        if event.logprobs is not None:
            self._logprobs = [*(self._logprobs or []), *event.logprobs]
        is_last = event.finish_reason is not None
        spans = self._text.add(event.tokens, text_end=event.text_end, is_last=is_last)
        if is_last:
            self.output = self._finish(event)
        text = "".join(part for part, _source in spans)
        self.pieces.append(
            Piece(text, event.tokens, tuple(spans), event.stats, event.logprobs, self.output, event.decision)
        )

    def _finish(self, event: Event) -> Output:
        assert event.finish_reason is not None
        first_s = self._last_s if self._first_s is None else self._first_s
        return Output(
            text=self._text.text,
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason=event.finish_reason,
            prompt_tokens=self._num_prompt,
            speculation=self._stats,
            traces=tuple(self._tokens),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            error=event.error,
            prefill_s=first_s - self._started_s,
            decode_s=self._last_s - first_s,
        )


class _Costs(NamedTuple):
    target: CostTable
    drafters: dict[str, CostTable]  # of the passes of draft models
    rows: dict[bool, float]  # of the target's choice at a row


def _resolved(config: Config, session: Session) -> Config:
    """Replace what the session has decided."""
    return replace(
        config,
        dtype=getattr(session, "dtype", config.dtype),
        backend=getattr(session, "backend", config.backend),
        device=str(getattr(session, "device", config.device)),
        threads=config.threads,
    )


def _succeeded(output: Output | None) -> Output:
    assert output is not None
    if output.finish_reason == "error":
        raise EngineError(f"the answer failed: {output.error}")
    return output


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping))
