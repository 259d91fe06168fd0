"""The law of a next token in plain Python, by the definitions and not by the code of the package: for tests."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from forerun.types import SamplingParams


def next_law(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Collection[int] = (),
) -> list[float]:
    """Return the law after every transform, in the order of `transformers`; ties of top-k and top-p are kept."""
    x = [float(value) for value in logits]
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] * params.repetition_penalty if x[token] < 0 else x[token] / params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    if len(output) < params.min_tokens:
        for token in end_ids:
            x[token] = -math.inf
    for function in params.logits_processors:
        x = [float(value) for value in function([*prompt, *output], np.asarray(x, dtype=np.float32))]
    highest = max(x)
    if params.temperature == 0:
        return [1.0 if i == x.index(highest) else 0.0 for i in range(len(x))]
    w = [math.exp((value - highest) / params.temperature) for value in x]
    ordered = sorted(w, reverse=True)
    if params.top_k:
        w = [value if value >= ordered[min(params.top_k, len(w)) - 1] else 0.0 for value in w]
    if params.top_p < 1:
        total = math.fsum(w)
        w = [value if math.fsum(v for v in w if v > value) < params.top_p * total else 0.0 for value in w]
    if params.min_p:
        w = [value if value >= params.min_p * max(w) else 0.0 for value in w]
    total = math.fsum(w)
    return [value / total for value in w]
