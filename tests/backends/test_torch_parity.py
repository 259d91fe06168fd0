"""Our decoder computes what `transformers` computes: every family, both file formats, every RoPE scaling.

Tiny random nets in fp32, logits to 1e-4. Sliding windows (8) are shorter than the texts (41 tokens).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.backends.base import Feed
from forerun.backends.torch import TorchSession
from forerun.models.load import load_checkpoint
from tests.backends.session_suite import as_numpy
from tests.families import FAMILIES, NUM_TOKENS, save_hf, write_gguf

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = 1e-4
LENGTH = 41
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with a factor": {**YARN, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn untruncated": {**YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.5},
}


def tokens(seed: int, length: int) -> list[int]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, NUM_TOKENS, length).tolist()  # type: ignore[no-any-return]


def reference(model: torch.nn.Module, text: list[int]) -> np.ndarray:
    """Return the logits of every row in one go, without the padded part of the head."""
    with torch.inference_mode():
        return as_numpy(model(torch.tensor([text])).logits[0, :, :NUM_TOKENS])


def assert_parity(session: TorchSession, model: torch.nn.Module) -> None:
    """Compare in one go, token by token, after rollbacks, in a ragged batch, and after a fork."""
    text, other = tokens(0, LENGTH), tokens(1, LENGTH)
    expected, expected_other = reference(model, text), reference(model, other)

    def check(logits: Any, rows: np.ndarray) -> None:
        np.testing.assert_allclose(as_numpy(logits), rows, atol=TOLERANCE, rtol=0)

    whole, single = session.open(), session.open()
    check(session.extend([Feed(whole, text, LENGTH)]).logits, expected)
    for position, token in enumerate(text):
        check(session.extend([Feed(single, [token], 1)]).logits, expected[position : position + 1])
    session.keep(single, 23)
    session.extend([Feed(single, other[:9])])
    session.keep(single, 19)
    check(session.extend([Feed(single, text[19:], LENGTH - 19)]).logits, expected[19:])

    branch, late = session.fork(whole, 30), session.open()
    session.keep(whole, 11)
    session.extend([Feed(late, other[:4])])
    feeds = [Feed(late, other[4:21], 3), Feed(branch, text[30:], 2), Feed(whole, text[11:12], 1)]
    rows = np.concatenate([expected_other[18:21], expected[-2:], expected[11:12]])
    check(session.extend(feeds).logits, rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_from_safetensors(family: str, device: str, tmp_path: Path) -> None:
    model = save_hf(family, tmp_path)
    assert_parity(TorchSession(load_checkpoint(str(tmp_path)), dtype="fp32", device=device), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_from_gguf(family: str, tmp_path: Path) -> None:
    model = save_hf(family, tmp_path / "hf")
    write_gguf(family, model, tmp_path / "tiny.gguf")
    assert_parity(TorchSession(load_checkpoint(str(tmp_path / "tiny.gguf")), dtype="fp32", device="cpu"), model)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_each_rope_scaling_is_that_of_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = save_hf("llama", tmp_path, rope_parameters=scaling)
    assert_parity(TorchSession(load_checkpoint(str(tmp_path)), dtype="fp32", device="cpu"), model)


def test_llama3_scaling_stored_as_factors_in_a_gguf_is_the_same(tmp_path: Path) -> None:
    model = save_hf("llama", tmp_path / "hf", rope_parameters=LLAMA3)
    write_gguf("llama", model, tmp_path / "tiny.gguf")
    assert_parity(TorchSession(load_checkpoint(str(tmp_path / "tiny.gguf")), dtype="fp32", device="cpu"), model)


def test_a_partly_rotated_head_keeps_its_other_dimensions(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = save_hf("phi3", tmp_path, rope_parameters=rope)
    assert_parity(TorchSession(load_checkpoint(str(tmp_path)), dtype="fp32", device="cpu"), model)


def test_dynamic_scaling_is_that_of_transformers_fed_token_by_token(tmp_path: Path) -> None:
    """There a row's base depends on how far its pass reaches; ours is that of passes of one row, always."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = save_hf("llama", tmp_path, rope_parameters=rope, max_position_embeddings=16)
    checkpoint = load_checkpoint(str(tmp_path))
    text, cache, rows = tokens(0, 29), None, list[np.ndarray]()
    with torch.inference_mode():
        for token in text:
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(as_numpy(output.logits[0, :, :NUM_TOKENS]))
    session = TorchSession(checkpoint, dtype="fp32", device="cpu")
    length = min(len(text), session.max_len)
    logits = session.extend([Feed(session.open(), text[:length], length)]).logits
    assert length > 16
    np.testing.assert_allclose(as_numpy(logits), np.concatenate(rows)[:length], atol=TOLERANCE, rtol=0)
