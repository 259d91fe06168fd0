"""Fill the table of likely successors for `recycle` from a target's own texts; ours is that of the demo model.

The target, tuned to answer, writes questions by going on after the marker of a user's turn, then answers them. For each
token of these texts its likeliest successors are added up over all places, by rank.

    python tools/fill_successors.py smollm2-135m --texts 1500
"""

import argparse
from collections import Counter, defaultdict

import numpy as np

from forerun import LLM, SamplingParams
from forerun.backends.base import Feed
from forerun.drafters.recycle import NUM_SUCCESSORS, save_successors
from forerun.sampling.arrays import top_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    llm = LLM(options.target, drafter="none", k=0)
    questions = _texts(llm, [_up_to_the_question(llm)] * options.texts, options.seed, 0.9, 64)
    prompts = [llm.encode(question.strip() or "Hello") for question in dict.fromkeys(questions)]
    outputs = llm.generate(
        prompts, [SamplingParams(temperature=0.7, max_tokens=160, seed=i) for i in range(len(prompts))]
    )
    scores: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for prompt, output in zip(prompts, outputs, strict=True):
        _count(llm, [*prompt, *output.token_ids], scores)
    table_VN = np.full((llm.session.vocab_size, NUM_SUCCESSORS), -1, np.int32)
    for token, found in scores.items():
        likely = [successor for successor, _score in found.most_common(NUM_SUCCESSORS)]
        table_VN[token, : len(likely)] = likely
    path = save_successors(table_VN, llm.tokenizer.fingerprint)
    total = sum(len(output.token_ids) for output in outputs)
    print(f"{len(prompts)} texts, {total} tokens written, {len(scores)} tokens known: {path.stat().st_size} bytes")


def _up_to_the_question(llm: LLM) -> tuple[int, ...]:
    """Return the tokens of the chat template that stand before what a user says."""
    a, b = (llm.encode([{"role": "user", "content": text}]) for text in ("Zebra", "Question"))
    return a[: next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)]


def _texts(llm: LLM, prompts: list[tuple[int, ...]], seed: int, temperature: float, length: int) -> list[str]:
    params = [
        SamplingParams(temperature=temperature, top_p=0.95, max_tokens=length, seed=seed * 100_000 + i)
        for i in range(len(prompts))
    ]
    return [output.text for output in llm.generate(prompts, params)]


def _count(llm: LLM, tokens: list[int], scores: defaultdict[int, Counter[int]]) -> None:
    seq = llm.session.open()
    logits_RV = llm.session.extend([Feed(seq, tokens, len(tokens))]).logits
    for token, row in zip(tokens, top_ids(logits_RV, NUM_SUCCESSORS).tolist(), strict=True):
        for rank, successor in enumerate(row):
            scores[token][successor] += 1 / (1 + rank)
    llm.session.release(seq)


if __name__ == "__main__":
    main()
