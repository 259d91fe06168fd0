"""From the name of a drafter to the drafter. A new kind is one file, and one line in `DRAFTERS`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Protocol

from forerun.backends.base import Feed, Session
from forerun.drafters.base import Drafter
from forerun.drafters.bridge import BridgeSession, Translation
from forerun.drafters.layerskip import CALIBRATION_TEXT, best_layers, kept_layers
from forerun.drafters.lm import LMDrafter
from forerun.drafters.mix import MixDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.drafters.recycle import RecycleDrafter, successors
from forerun.drafters.suffix import Past, SuffixDrafter
from forerun.errors import OptionError
from forerun.models.load import ForeignFolder
from forerun.models.weights import Checkpoint


class OpenModel(Protocol):
    """Loads a draft model; None: the target once more. `dtype` None: as the settings say."""

    def __call__(self, name: str | None, dtype: str | None = None) -> tuple[Checkpoint | ForeignFolder, Session]: ...


@dataclass(frozen=True)
class Parts:
    """What a drafter may be built from."""

    target: Checkpoint | ForeignFolder
    session: Session  # the target's
    open_model: OpenModel
    open_past: Callable[[str | None], Past] = field(default=lambda _file: Past())  # of the file of that name, if any
    argument: str = ""  # what follows the colon in its name
    inner: Drafter | None = None  # of a cascade: what drafts for this one


@dataclass(frozen=True)
class Kind:
    """A kind of drafter."""

    usage: str  # with a colon where it takes an argument, in brackets where that may be left out
    build: Callable[[Parts], Drafter | None]
    is_model: bool = False  # may have an inner drafter
    parts: Callable[[str], Sequence[str]] = field(default=lambda _argument: ())  # names in its argument

    def takes(self, argument: str) -> bool:
        return "[:" in self.usage or bool(argument) == (":" in self.usage)


def _ngram(parts: Parts) -> Drafter:
    return NgramDrafter(reach=_reach(parts))


def _reach(parts: Parts) -> int:
    flat = getattr(parts.session, "backend", "") == "torch"  # there a pass over 9 rows costs little more than over 1
    return 2 if flat else 1


def _suffix(parts: Parts) -> Drafter:
    past = None if parts.argument == "isolated" else parts.open_past(parts.argument or None)
    return SuffixDrafter(past=past, reach=_reach(parts))


def _recycle(parts: Parts) -> Drafter:
    table_VN = successors(parts.target.tokenizer.fingerprint, parts.session.vocab_size)
    return RecycleDrafter(table_VN, max_drafts=8 * _reach(parts))


def _lm(parts: Parts) -> Drafter:
    draft, session = parts.open_model(parts.argument)
    if draft.tokenizer.same_vocabulary(parts.target.tokenizer):  # there is a difference
        translation = Translation(parts.target.tokenizer, draft.tokenizer)
        session = BridgeSession(session, translation, parts.session.vocab_size)
    return LMDrafter(session, vocab_size=parts.session.vocab_size, inner=parts.inner)


def _layerskip(parts: Parts) -> Drafter:
    session, argument = parts.session, parts.argument
    if argument == "auto":
        layers = best_layers(session, parts.target.tokenizer.encode(CALIBRATION_TEXT), _seconds_of_a_row)
    elif argument.isascii() and argument.isdigit():
        layers = kept_layers(session.num_layers, int(argument))
    else:
        raise OptionError(
            f"drafter is 'layerskip:{argument}'; expected layerskip:auto, or how many layers to leave out"
        )
    return LMDrafter(session.subset(layers), vocab_size=parts.session.vocab_size, name="layerskip", inner=parts.inner)


def _seconds_of_a_row(session: Session) -> float:
    seq, times = session.open(), []
    try:
        for _ in range(8):
            start = perf_counter()
            float(session.extend([Feed(seq, [0], 1)]).logits[-1, 0])
            times.append(perf_counter() - start)
    finally:
        session.release(seq)
    return median(times[1:])


def _quant(parts: Parts) -> Drafter:
    if parts.argument != "q4":
        raise OptionError(f"drafter is 'quant:{parts.argument}'; expected quant:q4")
    if getattr(parts.session, "dtype", "") == "q4":
        raise OptionError("quant:q4 drafts by a 4-bit copy of the target, and the target itself has 4 bits")
    _target, session = parts.open_model(None, dtype="q4")
    return LMDrafter(session, vocab_size=parts.session.vocab_size, name="quant", inner=parts.inner)


def _cascade(parts: Parts) -> Drafter:
    inner = None
    for name in reversed(names_in(parts.argument)):
        inner = build(name, replace(parts, inner=inner))
    assert inner is not None
    return inner


def _mix(parts: Parts) -> Drafter:
    return MixDrafter([_built(name, parts) for name in names_in(parts.argument)])


def _built(name: str, parts: Parts) -> Drafter:
    drafter = build(name, parts)
    assert drafter is not None
    return drafter


def names_in(argument: str) -> list[str]:
    """Split `lm:MODEL+ngram` at those + that a kind follows; the name of a model may have others.

    A cascade takes all that follows it.
    """
    names = re.split(rf"\+(?=(?:{'|'.join(DRAFTERS)})(?::|\+|$))", argument)
    for i, name in enumerate(names):
        if name.startswith("cascade:"):
            return [*names[:i], "+".join(names[i:])]
    return names


DRAFTERS: dict[str, Kind] = {
    "none": Kind("none", lambda _parts: None),
    "ngram": Kind("ngram", _ngram),
    "suffix": Kind("suffix[:isolated|FILE]", _suffix),
    "recycle": Kind("recycle", _recycle),
    "lm": Kind("lm:MODEL", _lm, is_model=True),
    "layerskip": Kind("layerskip:N", _layerskip, is_model=True),
    "quant": Kind("quant:q4", _quant, is_model=True),
    "cascade": Kind("cascade:lm:MODEL+ngram", _cascade, is_model=True, parts=names_in),
    "mix": Kind("mix:A+B", _mix, parts=names_in),
}


AUTO = ("suffix", "recycle")  # what "auto" lets the controller choose among; without a controller it is the first


def drafter_names(name: str, *, is_controlled: bool) -> Sequence[str]:
    """Return the drafters that a name stands for: a controller mixes by itself, by what is measured."""
    if name == "auto":
        return AUTO if is_controlled else AUTO[:1]
    kind, argument = drafter_kind(name)
    return names_in(argument) if kind is DRAFTERS["mix"] and is_controlled else (name,)


def drafter_kind(name: str) -> tuple[Kind, str]:
    """Return the kind that a name such as `lm:MODEL` asks for, and its argument. Raises OptionError."""
    kind_name, colon, argument = name.partition(":")
    kind = DRAFTERS.get(kind_name)
    if kind is None or bool(colon) != bool(argument) or not kind.takes(argument):
        usages = ", ".join(["auto", *(kind.usage for kind in DRAFTERS.values())])
        raise OptionError(f"drafter is {name!r}; expected one of {usages}")
    names = kind.parts(argument)
    kinds = [drafter_kind(part)[0] for part in names]
    if names and (len(names) < 2 or DRAFTERS["none"] in kinds or DRAFTERS["mix"] in kinds):
        raise OptionError(f"drafter is {name!r}; expected two drafters or more, as in {kind.usage}")
    if kind is DRAFTERS["cascade"] and not all(outer.is_model for outer in kinds[:-1]):
        raise OptionError(f"drafter is {name!r}; in a cascade all but the last must be draft models")
    return kind, argument


def build(name: str, parts: Parts) -> Drafter | None:
    """Return the drafter of that name. Raises OptionError, and what loading a model raises."""
    kind, argument = drafter_kind(name)
    return kind.build(replace(parts, argument=argument))
