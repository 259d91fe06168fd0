"""From the name of a drafter to the drafter. A new kind is one file, and one line in `DRAFTERS`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forerun.backends.base import Session
from forerun.drafters.base import Drafter
from forerun.drafters.lm import LMDrafter
from forerun.drafters.ngram import NgramDrafter
from forerun.errors import OptionError
from forerun.models.weights import Checkpoint

OpenModel = Callable[[str], tuple[Checkpoint, Session]]


class Parts(NamedTuple):
    """What a drafter may be built from."""

    argument: str  # what follows the colon in its name
    target: Checkpoint
    session: Session  # the target's
    open_model: OpenModel  # loads a draft model


class Kind(NamedTuple):
    """A kind of drafter."""

    usage: str
    default_k: int  # drafts a round where the user leaves it to us
    build: Callable[[Parts], Drafter | None]


def _ngram(parts: Parts) -> Drafter:
    flat = getattr(parts.session, "backend", "") == "torch"  # there a pass over 9 rows costs little more than over 1
    return NgramDrafter(reach=2 if flat else 1)


def _lm(parts: Parts) -> Drafter:
    draft, session = parts.open_model(parts.argument)
    difference = draft.tokenizer.same_vocabulary(parts.target.tokenizer)
    if difference:
        raise OptionError(
            f"the draft model {parts.argument} has another tokenizer than the target: {difference}; "
            "take a draft model of the same family"
        )
    return LMDrafter(session, vocab_size=parts.session.vocab_size)


DRAFTERS: dict[str, Kind] = {
    "none": Kind("none", 0, lambda _parts: None),
    "ngram": Kind("ngram", 8, _ngram),
    "lm": Kind("lm:MODEL", 5, _lm),
}


AUTO = ("ngram",)  # what "auto" lets the controller choose among


def drafter_names(name: str) -> Sequence[str]:
    """Return the drafters that a name stands for."""
    return AUTO if name == "auto" else (name,)


def drafter_kind(name: str) -> tuple[Kind, str]:
    """Return the kind that a name such as `lm:MODEL` asks for, and its argument. Raises OptionError."""
    kind_name, colon, argument = name.partition(":")
    kind = DRAFTERS.get(kind_name)
    if kind is None or bool(argument) != (":" in kind.usage) or bool(colon) != bool(argument):
        usages = ", ".join(["auto", *(kind.usage for kind in DRAFTERS.values())])
        raise OptionError(f"drafter is {name!r}; expected one of {usages}")
    return kind, argument
