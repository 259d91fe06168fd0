"""The target with layers left out as its own drafter (Draft & Verify, Zhang et al. 2309.08168; LayerSkip 2404.16710).

Which layers can go is found on a short text: each one's absence is scored by the overlap of the laws, Σ min(p, q), the
chance that a draft is accepted; then the least harmful are taken out together, as many as promise the most tokens per
second.
"""

from collections.abc import Callable, Sequence

import numpy as np

from forerun.backends.base import Feed, Session
from forerun.errors import OptionError
from forerun.sampling.arrays import on_host
from forerun.sampling.laws import log_softmax

CALIBRATION_TEXT = (
    "The harbour lay quiet in the morning, and only a few boats had gone out. Anna counted the crates on the quay, "
    "wrote the number into her book, and walked back to the office. There were three letters on the table: one from "
    "the bank, one from her brother, and one without a name."
)
_SCORED = 40  # positions
_WARM_UP = 8  # positions that are not scored
_MAX_DRAFTS = 8

SecondsOf = Callable[[Session], float]


def kept_layers(num_layers: int, skipped: int) -> list[int]:
    """Return what stays when so many layers go, spread evenly over the inner ones. Raises OptionError."""
    if not 1 <= skipped <= num_layers - 2:
        raise OptionError(
            f"layerskip leaves out {skipped} layers; expected auto or 1 to {num_layers - 2}: the target has "
            f"{num_layers}, and the first and the last stay"
        )
    inner = num_layers - 2
    gone = {1 + (2 * i + 1) * inner // (2 * skipped) for i in range(skipped)}
    return [layer for layer in range(num_layers) if layer not in gone]


def best_layers(session: Session, tokens: Sequence[int], seconds_of: SecondsOf) -> list[int]:
    """Return the layers that make the fastest drafter by the text `tokens`.

    `seconds_of` tells what a pass over one row of a session costs.
    """
    num_layers = session.num_layers
    everything = list(range(num_layers))
    tokens = list(tokens)[: _WARM_UP + _SCORED]
    p_RV = _laws(session, tokens)

    def overlap(layers: Sequence[int]) -> float:
        q_RV = _laws(session.subset(layers), tokens)
        return float(np.minimum(p_RV, q_RV).sum(axis=-1).mean())

    alone = {layer: overlap([other for other in everything if other != layer]) for layer in everything[1:-1]}
    by_harm = sorted(alone, key=lambda layer: (-alone[layer], layer))
    whole, half = seconds_of(session), seconds_of(session.subset(everything[: num_layers // 2]))
    a_layer = max(0.0, whole - half) / (num_layers - num_layers // 2)
    best, best_speed = everything[:-1], -1.0
    for skipped in range(1, len(by_harm) + 1):
        layers = sorted(set(everything) - set(by_harm[:skipped]))
        chance = alone[by_harm[0]] if skipped == 1 else overlap(layers)
        speed = _speed(chance, max(0.0, whole - skipped * a_layer) / whole if whole else 1.0)
        if speed > best_speed:
            best, best_speed = layers, speed
        if chance < 0.2:
            break
    return best


def _speed(chance: float, cost: float) -> float:
    """Return the best tokens per round over its cost in passes, rows beyond the first one being cheap."""
    tokens, reach, best = 1.0, 1.0, 0.0
    for k in range(1, _MAX_DRAFTS + 1):
        reach *= chance
        tokens += reach
        best = max(best, tokens / (1.0 + k * (cost + 0.1)))
    return best


def _laws(session: Session, tokens: Sequence[int]) -> np.ndarray:
    """Return the laws of all but the first positions at temperature 1: (R, V)."""
    seq = session.open()
    try:
        logits = on_host(session.extend([Feed(seq, tokens, max(1, len(tokens) - _WARM_UP))]).logits)
        laws: np.ndarray = np.exp(log_softmax(logits))
        return laws
    finally:
        session.release(seq)
