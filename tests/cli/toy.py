"""A toy model behind the command line: an exact table instead of a net, so that most tests need no torch.

Run as a program, it is `forerun` on that toy; TOY_MAX_LEN and TOY_DELAY_S (a pass takes so long) set it.
"""

import os
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import forerun.engine.llm
from forerun.backends.base import Feed, Scores
from forerun.backends.toy import ToySession
from forerun.models.tokenizer import Tokenizer, TokenizerSettings

EOS, START, END = 256, 257, 258
VOCAB_SIZE = 259
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + mark|default('') + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


class SlowSession(ToySession):
    """Counts the rows it is fed, and takes its time; some of its passes may be spoiled."""

    dtype = "fp32"
    device = "cpu"
    backend = "torch"  # as far as settings go
    delay_s = 0.0
    num_rows = 0
    widths: list[int]
    wide_shift = 0.0  # added to the logits of one letter in passes of several rows, as rounding does

    def extend(self, feeds: Sequence[Feed], *, taps: Sequence[int] = ()) -> Scores:
        time.sleep(self.delay_s)
        self.num_rows += sum(len(feed.tokens) for feed in feeds)
        scores = super().extend(feeds, taps=taps)
        if self.wide_shift and feeds[0].num_logits > 1:
            scores.logits[:, ord("z")] += self.wide_shift
        return scores


def tokenizer(*, template: bool = True) -> Tokenizer:
    """Return a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = {_byte(character): character for character in alphabet}
    backend = Backend(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|eos|>", "<|start|>", "<|end|>"])
    templates = {"default": TEMPLATE} if template else {}
    return Tokenizer(backend, TokenizerSettings(None, (EOS, END), False, templates, {}))


def _byte(character: str) -> int:
    from forerun.models.tokenizer import _BYTES

    return _BYTES.get(ord(character), ord(character))


def table() -> np.ndarray:
    """Return logits (V, V) of letters, spaces and full stops. Greedy text soon goes in circles."""
    letters = [ord(character) for character in "abcdefghijklmnopqrstuvwxyz ."]
    logits = np.full((VOCAB_SIZE, VOCAB_SIZE), -30.0, np.float32)
    logits[:, letters] = np.random.default_rng(3).normal(scale=2.0, size=(VOCAB_SIZE, len(letters)))
    logits[ord("."), END] = 3.0
    return logits


def install(*, max_len: int = 2048, delay_s: float = 0.0, template: bool = True) -> SlowSession:
    """Let `LLM` load the toy, whatever it is asked for, and return the session that it will get."""
    session = SlowSession(table(), max_len=max_len)
    session.delay_s = delay_s
    checkpoint = SimpleNamespace(tokenizer=tokenizer(template=template))

    def load(name: str, *, progress: Any = None, **_settings: Any) -> Any:
        if progress:
            progress(f"reading {name}", 0, None)
        return checkpoint

    forerun.engine.llm.load_model = load
    forerun.engine.llm.open_session = lambda *_args, **_settings: session
    return session


if __name__ == "__main__":
    from forerun.cli import main

    install(max_len=int(os.environ.get("TOY_MAX_LEN", "2048")), delay_s=float(os.environ.get("TOY_DELAY_S", "0")))
    sys.exit(main())
