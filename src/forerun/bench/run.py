"""One run of the bench, from options to a document of plain values; `report` makes tables of it."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from forerun import __version__
from forerun.backends.open import choose_backend
from forerun.bench import machine, measure, stats
from forerun.bench.measure import BatchRun, Contender, Forerun, Ids, SessionPasses
from forerun.bench.peer import Peer, PeerMissingError, PeerSetup
from forerun.bench.peers import check_peer, open_peer
from forerun.bench.stats import Run
from forerun.bench.workload import Prompt, load_workload
from forerun.config import Config
from forerun.engine.llm import LLM
from forerun.errors import OptionError
from forerun.models.files import Progress as Loading
from forerun.models.files import write_atomically
from forerun.types import SamplingParams

_WARM_UP_TOKENS = 16
_ROUND_PROMPTS = 6  # of the workload, as different in kind as can be: their rounds are taken apart
_ROUND_TOKENS = 64


class Progress(Protocol):
    """Is told what is going on."""

    def stage(self, text: str) -> None:
        """Something else begins."""

    def step(self, text: str) -> None:
        """So far has it come."""

    def done(self) -> None:
        """All is measured."""


class Quiet:
    """Tells nobody."""

    def stage(self, text: str) -> None: ...

    def step(self, text: str) -> None: ...

    def done(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """What to measure."""

    config: Config
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    prompts: Path | None = None  # None: the packaged ones
    kinds: tuple[str, ...] = ()  # none: all
    limit: int | None = None  # so many prompts, taken from all kinds in turn
    repeats: int = 3
    batch: int | None = None  # so many sequences at once
    curve: bool = True
    context: int = 256  # of the curve
    peers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("repeats", 1), ("limit", 1), ("batch", 2), ("context", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"{name} is {value}; expected a whole number, {least} or more")
        for peer in self.peers:
            check_peer(peer)
        self.params(0)  # refuses impossible sampling settings before a model is loaded

    def params(self, prompt: int, *, max_tokens: int | None = None) -> SamplingParams:
        """Return the settings of one prompt; each has a seed of its own."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=max_tokens or self.max_tokens,
            seed=self.seed + prompt,
        )


def run_bench(options: Options, progress: Progress | None = None) -> dict[str, Any]:
    """Measure everything that `options` ask for."""
    progress = progress or Quiet()
    prompts = select(load_workload(options.prompts), options.kinds, options.limit)
    config = options.config
    if choose_backend(config.backend, config.dtype, config.device) == "torch":
        with suppress(ModuleNotFoundError):
            import_module("forerun.backends.torch")  # so that its memory counts as that of imports
    imported_s, before = machine.process_age_s(), machine.memory()
    start = perf_counter()
    with LLM(config, progress=loading(progress)) as llm:
        load_s = perf_counter() - start
        document = Bench(options, prompts, llm, progress).run({"imported_s": imported_s, "load_s": load_s}, before)
    progress.done()
    return document


def loading(progress: Progress) -> Loading:
    """Return a callback for loading that names each stage once."""
    told: set[str] = set()

    def show(label: str, _done: int, _total: int | None) -> None:
        if label not in told:
            told.add(label)
            progress.stage(label)

    return show


def select(prompts: Sequence[Prompt], kinds: Sequence[str], limit: int | None) -> list[Prompt]:
    """Return the prompts of these kinds; with a limit, the first of each kind, then the second of each, …"""
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        raise OptionError(f"kind is {unknown[0]!r}; the prompts have {', '.join(known)}")
    chosen = [prompt for prompt in prompts if not kinds or prompt.kind in kinds]
    if limit is None:
        return chosen
    rank = {id(prompt): sum(1 for other in chosen[:i] if other.kind == prompt.kind) for i, prompt in enumerate(chosen)}
    taken = sorted(chosen, key=lambda prompt: rank[id(prompt)])[:limit]
    return [prompt for prompt in chosen if prompt in taken]


def check_writable(path: Path) -> None:
    """Raise OptionError, before anything is measured, if the document couldn't be written there."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"can't write {path}; expected the name of a file in a folder that exists and is yours")


def write_document(document: dict[str, Any], path: Path) -> None:
    """Write the JSON document, whole or not at all."""
    try:
        write_atomically(path, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise OptionError(f"can't write {path}: {error.strerror or error}") from error


class Bench:
    """A loaded model and what is to be measured on it."""

    def __init__(self, options: Options, prompts: Sequence[Prompt], llm: LLM, progress: Progress) -> None:
        self.options = options
        self.prompts = prompts
        self.llm = llm
        self.progress = progress
        self.ids: list[Ids] = [llm.encode(prompt.prompt) for prompt in prompts]
        self.params = [options.params(i) for i in range(len(prompts))]
        self.wait = measure.waiter(llm.session)
        self.dtype = str(llm.config.dtype)
        plain = Forerun(llm, "plain", k=0)
        self.ours = [plain]
        if llm.drafters and llm.config.k != 0:
            self.ours.append(Forerun(llm, "speculative", k=None, baseline="plain"))
        self.contenders: list[Contender] = list(self.ours)
        self.peers: dict[str, Peer] = {}
        self.skipped_peers: dict[str, str] = {}
        self.runs: list[list[list[Run]]] = []  # [contender][prompt][repetition]
        self.batches: list[list[BatchRun]] = [[] for _ in self.ours]

    def run(self, start: dict[str, float | None], memory_before: dict[str, int | None]) -> dict[str, Any]:
        start |= self._first_token()
        self._warm_up()
        memory = {"after_imports": memory_before, "running": machine.memory(), **self._weight_bytes()}
        ceiling = self._ceiling()
        rounds = self._rounds()
        self._open_peers()
        curve = self._curve() if self.options.curve else None
        self._measure()
        return {
            **self.heading(),
            "start": start,
            "memory": memory,
            "contenders": {c.name: self._contender(i) for i, c in enumerate(self.contenders)},
            "peers": {name: self._peer(peer) for name, peer in self.peers.items()},
            "skipped_peers": self.skipped_peers,
            "texts": self._texts(),
            "ceiling": ceiling,
            "curve": curve,
            "rounds": rounds,
            "batch": self._batch() if self.options.batch else None,
            "controller": self._decisions(),
            "prompts": [self._prompt(i) for i in range(len(self.prompts))],
        }

    def heading(self) -> dict[str, Any]:
        """Return what was run, on what, and when."""
        return {
            "forerun": __version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "hardware": machine.hardware(str(self.llm.config.device)),
            "versions": machine.versions(),
            "config": self.llm.config.as_dict(),
            "instruction_set": getattr(self.llm.session, "instruction_set", None),
            "workload": self._workload(),
        }

    def speeds(self) -> dict[str, dict[str, Any]]:
        """Measure the speeds of all contenders and nothing else."""
        self._warm_up()
        self._measure()
        return {contender.name: self._contender(i) for i, contender in enumerate(self.contenders)}

    def _decisions(self) -> list[dict[str, Any]]:
        """Return what the controller decided, round by round, on one prompt of each kind."""
        if self.llm.config.k != "auto" or not self.llm.drafters:
            return []
        found = []
        self.llm.forget()
        for prompt in select(self.prompts, (), len(self._kinds())):
            place = self.prompts.index(prompt)
            pieces = self.llm.stream(list(self.ids[place]), self.params[place])
            rounds = [
                {"drafts": piece.stats.proposed, "accepted": piece.stats.accepted, **piece.decision._asdict()}
                for piece in pieces
                if piece.decision is not None
            ]
            found.append({"id": prompt.id, "kind": prompt.kind, "rounds": rounds})
        return found

    def _first_token(self) -> dict[str, float | None]:
        run = self.ours[0].run(self.ids[0], self.options.params(0, max_tokens=1))
        return {"first_prefill_s": run.prefill_s, "to_first_token_s": machine.process_age_s()}

    def _warm_up(self) -> None:
        self.progress.stage("warming up")
        for contender in self.contenders:
            contender.run(self.ids[0], self.options.params(0, max_tokens=_WARM_UP_TOKENS))

    def _weight_bytes(self) -> dict[str, int | None]:
        return {"weights": getattr(self.llm.session, "weight_bytes", None)}

    def _curve(self) -> dict[str, Any] | None:
        text = [token for ids in self.ids for token in ids]
        widest = max(measure.CURVE_ROWS)
        context = min(self.options.context, self.llm.session.max_len - widest)
        if context < 1:
            return None
        self.progress.stage(f"timing passes over 1 to {widest} rows after {context} tokens")
        tokens = [text[i % len(text)] for i in range(context)]
        others = {name: peer.passes for name, peer in self.peers.items() if peer.passes is not None}
        ours = SessionPasses(self.llm.session, wait=self.wait)
        (times,) = measure.pass_times([ours], tokens)
        race: dict[str, Any] = {}
        if others:
            names = ", ".join(others)
            self.progress.stage(f"timing passes in turn with {names}")
            found = measure.pass_times([ours, *others.values()], tokens, rows=measure.RACE_ROWS)
            race = dict(zip(["ours", *others], map(_curve_rows, found), strict=True))
        return {"context": context, "rows": _curve_rows(times), "race": race}

    def _ceiling(self) -> dict[str, Any] | None:
        num_bytes = self._weight_bytes()["weights"]
        if not num_bytes:
            return None
        self.progress.stage("reading memory as fast as it goes")
        example = measure.example_logits(self.llm.session)
        bandwidth = machine.read_bandwidth(example, threads=self.llm.config.threads or 1)
        is_cpu = str(self.llm.config.device) == "cpu"
        cache_bytes = machine.last_level_cache_bytes() if is_cpu else None
        ceiling = stats.Ceiling(bandwidth.bytes_per_s, num_bytes, cache_bytes)
        return {
            **bandwidth._asdict(),
            "bytes_per_pass": num_bytes,
            "tokens_per_s": ceiling.tokens_per_s,
            "fits_in_cache": ceiling.fits_in_cache,
        }

    def _rounds(self) -> dict[str, Any]:
        self.progress.stage("taking rounds apart")
        chosen = select(self.prompts, (), _ROUND_PROMPTS)
        places = [i for i, prompt in enumerate(self.prompts) if prompt in chosen]
        rounds: list[list[stats.Round]] = [[] for _ in self.ours]
        for turn, i in enumerate(places):
            params = [self.options.params(i, max_tokens=min(_ROUND_TOKENS, self.options.max_tokens))]
            for which in stats.order(len(self.ours), repetition=0, prompt=turn):
                k = (0, None)[which]
                rounds[which] += measure.time_rounds(self.llm, [self.ids[i]], params, k=k, wait=self.wait)
        one_row_s = median(r.target for r in rounds[0]) if rounds[0] else None
        document = {"one_row_pass_ms": one_row_s and 1e3 * one_row_s, "plain": stats.split_rounds(rounds[0], one_row_s)}
        if len(rounds) > 1:
            most = self.llm.config.k if isinstance(self.llm.config.k, int) else _ROUND_TOKENS
            full = stats.full_rounds(rounds[1], most)
            document["speculative"] = stats.split_rounds(rounds[1], one_row_s)
            document["full"] = stats.split_rounds(full, one_row_s)
            document["full_k"] = full[0].num_drafts if full else None
        return document

    def _open_peers(self) -> None:
        config, widest = self.llm.config, max(measure.CURVE_ROWS)
        longest = max(map(len, self.ids)) + self.options.max_tokens
        setup = PeerSetup(
            self.llm.checkpoint,
            self.dtype,
            str(config.device),
            config.threads or 1,
            num_positions=min(max(longest, self.options.context) + widest, self.llm.session.max_len),
            cache_dir=config.cache_dir,
        )
        for name in self.options.peers:
            self.progress.stage(f"loading the weights into {name}")
            try:
                peer = open_peer(name, setup)
            except PeerMissingError as error:
                self.skipped_peers[name] = str(error)
                self.progress.stage(f"skipped {name}: {error}")
                continue
            self.peers[name] = peer
            for contender in peer.contenders:
                contender.run(self.ids[0], self.options.params(0, max_tokens=_WARM_UP_TOKENS))
                self.contenders.append(contender)

    def _measure(self) -> None:
        repeats, count = self.options.repeats, len(self.prompts)
        self.runs = [[[] for _ in self.prompts] for _ in self.contenders]
        for repetition in range(repeats):
            self.progress.stage(f"repetition {repetition + 1} of {repeats}")
            self.llm.forget()  # what was written before: drafters that remember it would guess this text at once
            found = measure.run_workload(self.contenders, self.ids, self.params, repetition=repetition)
            for prompt, contender, run in found:
                self.runs[contender][prompt].append(run)
                name = self.contenders[contender].name
                self.progress.step(f"prompt {prompt + 1} of {count}: {name}")
            if self.options.batch:
                self._measure_batch(repetition)

    def _measure_batch(self, repetition: int) -> None:
        self.llm.forget()
        size = self.options.batch or 0
        places = [i % len(self.prompts) for i in range(size)]
        params = [self.options.params(i) for i in range(size)]
        for which in stats.order(len(self.ours), repetition=repetition, prompt=0):
            self.progress.step(f"{size} at once: {self.ours[which].name}")
            self.batches[which].append(self.ours[which].run_batch([self.ids[i] for i in places], params))

    def _cells(self, contender: int, kind: str | None = None) -> list[stats.Cell]:
        return [
            stats.condense(runs)
            for prompt, runs in zip(self.prompts, self.runs[contender], strict=True)
            if kind in (None, prompt.kind)
        ]

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(prompt.kind for prompt in self.prompts))

    def _contender(self, index: int) -> dict[str, Any]:
        """Return what one contender reached; counts are those of the first repetition."""
        own = self.contenders[index]
        names = [contender.name for contender in self.contenders]
        base = None if own.baseline is None else names.index(own.baseline)
        spread = None if base is None else stats.speedup_range(self.runs[index], self.runs[base])
        firsts = [runs[0] for runs in self.runs[index]]
        return {
            "baseline": own.baseline,
            **self._speed(index, base, None),
            "speedup_range": spread and list(spread),
            "over_plain": stats.ratio(stats.rate(self._cells(index)), stats.rate(self._cells(0))),
            "prefill_s": median(run.prefill_s for runs in self.runs[index] for run in runs),
            "speculation": _counts(firsts),
            "kinds": {
                kind: {
                    **self._speed(index, base, kind),
                    "speculation": _counts([r for p, r in zip(self.prompts, firsts, strict=True) if p.kind == kind]),
                }
                for kind in self._kinds()
            },
        }

    def _speed(self, index: int, base: int | None, kind: str | None) -> dict[str, Any]:
        cells = self._cells(index, kind)
        speed = stats.rate(cells)
        return {
            "tokens_per_s": speed,
            "tokens": sum(cell.num_tokens for cell in cells),
            "seconds": sum(cell.seconds for cell in cells),
            "speedup": None if base is None else stats.ratio(speed, stats.rate(self._cells(base, kind))),
        }

    def _texts(self) -> list[dict[str, Any]]:
        """Compare texts that ought to be the same: greedy ones with our plain text and with their own plain text."""
        is_greedy = self.options.temperature == 0
        coupled = self.llm.config.verify == "coupled"
        names = [contender.name for contender in self.contenders]
        pairs = []
        for index, contender in enumerate(self.contenders):
            references = dict.fromkeys([contender.baseline or "plain", "plain"])
            if not contender.has_our_weights:
                continue
            if is_greedy or (coupled and contender in self.ours):
                pairs += [(index, names.index(name)) for name in references if name != contender.name]
        if pairs:
            self.progress.stage("comparing texts")
        return [self._compare(index, reference, is_greedy=is_greedy) for index, reference in pairs]

    def _compare(self, index: int, reference: int, *, is_greedy: bool) -> dict[str, Any]:
        differences = measure.compare_texts(
            [runs[0].token_ids for runs in self.runs[index]],
            [runs[0].token_ids for runs in self.runs[reference]],
            [(prompt.id, ids) for prompt, ids in zip(self.prompts, self.ids, strict=True)],
            session=self.llm.session,
            dtype=self.dtype,
            is_greedy=is_greedy,
        )
        return {
            "text": self.contenders[index].name,
            "reference": self.contenders[reference].name,
            "same": len(self.prompts) - len(differences),
            "of": len(self.prompts),
            "differences": [difference._asdict() for difference in differences],
        }

    def _peer(self, peer: Peer) -> dict[str, Any]:
        return {"contenders": [contender.name for contender in peer.contenders], "remarks": list(peer.remarks)}

    def _batch(self) -> dict[str, Any]:
        """Compare N at once with the same N one after another, prompt reading included in both."""
        size = self.options.batch or 0
        document: dict[str, Any] = {"size": size}
        for which, contender in enumerate(self.ours):
            at_once = median(run.num_tokens / run.seconds for run in self.batches[which])
            singles = [self.runs[which][i % len(self.prompts)] for i in range(size)]
            num_tokens = sum(len(runs[0].token_ids) for runs in singles)
            alone = num_tokens / sum(median(run.prefill_s + run.decode_s for run in runs) for runs in singles)
            document[contender.name] = {"tokens_per_s": at_once, "one_by_one": alone, "ratio": at_once / alone}
        return document

    def _workload(self) -> dict[str, Any]:
        options = self.options
        return {
            "file": None if options.prompts is None else options.prompts.name,
            "prompts": len(self.prompts),
            "kinds": self._kinds(),
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.seed,
            "repeats": options.repeats,
        }

    def _prompt(self, index: int) -> dict[str, Any]:
        prompt = self.prompts[index]
        return {
            "id": prompt.id,
            "kind": prompt.kind,
            "prompt_tokens": len(self.ids[index]),
            "contenders": {
                contender.name: {
                    "completion_tokens": len(runs[index][0].token_ids),
                    "prefill_s": [run.prefill_s for run in runs[index]],
                    "decode_s": [run.decode_s for run in runs[index]],
                    "tokens_per_s": stats.rate([stats.condense(runs[index])]),
                }
                for contender, runs in zip(self.contenders, self.runs, strict=True)
            },
        }


def _curve_rows(times: Mapping[int, float]) -> dict[str, Any]:
    return {str(k): {"ms": 1e3 * t, "over_one_row": stats.ratio(t, times[1])} for k, t in times.items()}


def _counts(runs: Sequence[Run]) -> dict[str, Any] | None:
    pooled = stats.pooled(runs)
    if pooled is None:
        return None
    return {
        **pooled.as_dict(),
        "reached_by_position": list(pooled.reached_by_position),
        "accepted_by_position": list(pooled.accepted_by_position),
    }
