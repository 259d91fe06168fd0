"""The torch backend is a Session; its numbers, limits, twins and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.backends.base import Feed, Session
from forerun.backends.torch import TorchSession, resolve_device, resolve_dtype
from forerun.backends.torch.attention import attend_fused, attend_plain
from forerun.backends.torch.cache import SlotCache
from forerun.backends.torch.linear import PackedLinear, PlainLinear, can_pack
from forerun.backends.torch.plan import Rows, attended_len, group_rows
from forerun.errors import OptionError, RequestError
from forerun.models.load import load_checkpoint
from forerun.models.weights import Checkpoint
from tests.backends.session_suite import SessionSuite, as_numpy
from tests.families import NUM_TOKENS, save_hf, write_gguf

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, "cpu")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model of each kind that matters to a session: full attention, and windows with soft caps."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "gemma2", "qwen3"):
        model = save_hf(family, folder / family, max_position_embeddings=96)
        write_gguf(family, model, folder / f"{family}.gguf", quant="Q8_0")
    return folder


def checkpoint(folder: Path, name: str = "llama") -> Checkpoint:
    return load_checkpoint(str(folder / name))


class TorchSuite(SessionSuite):
    family, dtype = "llama", "fp32"
    tolerance = 1e-4

    @pytest.fixture(params=DEVICES)
    def session(self, request: pytest.FixtureRequest, folder: Path) -> Session:
        return TorchSession(checkpoint(folder, self.family), dtype=self.dtype, device=request.param)


class TestTorchLlamaFp32(TorchSuite):
    pass


class TestTorchGemma2Fp32(TorchSuite):
    family = "gemma2"


class TestTorchQwen3Fp32(TorchSuite):
    family = "qwen3"


class TestTorchLlamaBf16(TorchSuite):
    """To the bit: rows don't depend on their neighbours."""

    dtype = "bf16"
    tolerance = 0.0 if torch.bfloat16 in PACKED else 0.5
    tree_tolerance = 0.5


class TestTorchOnDirtyMemory(TorchSuite):
    """Fresh cache memory may hold anything; attention reads whole blocks of it, and 0 · NaN is NaN."""

    @pytest.fixture(autouse=True)
    def _poison(self, monkeypatch: pytest.MonkeyPatch) -> None:
        empty = SlotCache._empty
        monkeypatch.setattr(SlotCache, "_empty", lambda *args: empty(*args).fill_(float("nan")))


def test_only_the_tokenizers_part_of_a_padded_head_is_kept(folder: Path) -> None:
    session = TorchSession(checkpoint(folder), dtype="fp32", device="cpu")
    assert session.vocab_size == NUM_TOKENS
    assert session.extend([Feed(session.open(), [1, 2], 2)]).logits.shape == (2, NUM_TOKENS)


@pytest.mark.parametrize("bad", [-1, NUM_TOKENS])
def test_an_id_that_no_token_has_is_refused(folder: Path, bad: int) -> None:
    session = TorchSession(checkpoint(folder), dtype="fp32", device="cpu")
    seq = session.open()
    with pytest.raises(RequestError, match=str(bad)):
        session.extend([Feed(seq, [1, bad])])
    assert session.length(seq) == 0


def test_a_full_cache_is_refused_before_anything_changes(folder: Path) -> None:
    session = TorchSession(checkpoint(folder), dtype="fp32", device="cpu", cache_tokens=20)
    first, second = session.open(), session.open()
    session.extend([Feed(first, list(range(12)))])
    assert session.room() == 8
    with pytest.raises(RequestError, match="room for 8 of 20"):
        session.extend([Feed(first, [1]), Feed(second, list(range(8)))])
    assert (session.length(first), session.length(second)) == (12, 0)


def test_two_models_live_in_one_process(folder: Path) -> None:
    def load() -> list[TorchSession]:
        return [TorchSession(checkpoint(folder, name), dtype="fp32", device="cpu") for name in ("llama", "gemma2")]

    alone = [as_numpy(session.extend([Feed(session.open(), [5, 6, 7], 3)]).logits) for session in load()]
    sessions = load()
    seqs = [session.open() for session in sessions]
    for step, token in enumerate([5, 6, 7]):
        for session, seq, expected in zip(sessions, seqs, alone, strict=True):
            row = as_numpy(session.extend([Feed(seq, [token], 1)]).logits)
            np.testing.assert_allclose(row, expected[step : step + 1], atol=1e-4)


def test_quantised_blocks_give_the_embedding_that_the_head_is_made_of(folder: Path) -> None:
    """The embedding is kept as raw blocks beside a packed head: a pass must see the dequantised numbers."""
    loaded = checkpoint(folder, "qwen3.gguf")
    assert loaded.tensor("embed").kind == "Q8_0"
    session = TorchSession(loaded, dtype="fp32", device="cpu")
    rows = loaded.tensor("embed").to_float32()[[3, 1, 3]]
    got = session._net._embed(torch.tensor([3, 1, 3]))
    np.testing.assert_array_equal(as_numpy(got), rows.astype(np.float64))


def test_a_session_knows_what_a_pass_reads(folder: Path) -> None:
    loaded = checkpoint(folder)
    fp32, bf16 = (TorchSession(loaded, dtype=dtype, device="cpu") for dtype in ("fp32", "bf16"))
    matrices = (
        sum(int(np.prod(loaded.tensor(name).shape)) for name in loaded.names() if name not in ("embed", "head"))
        + NUM_TOKENS * loaded.config.hidden_size
    )
    assert fp32.weight_bytes == 4 * matrices
    assert bf16.weight_bytes == 2 * matrices


def test_auto_is_resolved_to_what_there_is() -> None:
    device = resolve_device("auto")
    assert device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("auto", "cpu") in ("bf16", "fp32")
    assert resolve_dtype("bf16", "cpu") == "bf16"
    for dtype, expected in (("fp16", "CPU"), ("q4", "q4")):
        with pytest.raises(OptionError, match=expected):
            resolve_dtype(dtype, "cpu")
    for name in ("tpu", "meta", "cuda:99"):
        with pytest.raises(OptionError, match=name):
            resolve_device(name)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_plain_products_agree(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_inputs, num_outputs in ((64, 37), (96, 64), (1536, 131)):
        weight = (torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
        offset = torch.randn(num_outputs, generator=generator).to(dtype) if bias else None
        with torch.inference_mode():
            plain, packed = PlainLinear(weight, offset), PackedLinear(weight, offset)
            assert plain.nbytes == packed.nbytes
            for num_rows in (0, 1, 2, 7, 16, 33):
                x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
                assert packed(x).shape == (num_rows, num_outputs)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(packed(x), plain(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_a_row_of_a_packed_product_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for num_inputs, num_outputs in ((576, 96), (1536, 96), (4864, 96)):
            product = PackedLinear(torch.randn(num_outputs, num_inputs, generator=generator).to(dtype))
            for _ in range(12):
                x = torch.randn(16, num_inputs, generator=generator).to(dtype)
                every = product(x)
                for num_rows in (1, 2, 3, 4, 6, 9, 13):
                    assert torch.equal(product(x[:num_rows].contiguous()), every[:num_rows]), (num_inputs, num_rows)


def test_the_twins_of_attention_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, 8, 16, generator=generator)
    key, value = torch.randn(2, 3, 2, 64, 16, generator=generator)
    mask = torch.zeros(3, 1, 8, 64).masked_fill_(torch.rand(3, 1, 8, 64, generator=generator) < 0.4, float("-inf"))
    results = [attend(query, key, value, mask, scale=0.3, softcap=None) for attend in (attend_fused, attend_plain)]
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)


def test_neighbours_share_a_call_unless_that_costs_more() -> None:
    near = [Rows(slot, 200 + slot, 1 + slot % 3, 3 * slot) for slot in range(16)]
    assert group_rows(near) == [near]
    far = [Rows(0, 10, 1, 0), Rows(9, 10, 1, 1)]
    assert group_rows(far) == [far]  # ten idle slots of ten keys are cheaper than another call
    long = [Rows(0, 3000, 1, 0), Rows(9, 3000, 1, 1)]
    assert len(group_rows(long)) == 2
    prompt = [Rows(0, 100, 600, 0), Rows(1, 100, 1, 600)]
    pieces = group_rows(prompt)
    assert [[(row.start, row.num_rows, row.first) for row in piece] for piece in pieces] == [
        [(100, 256, 0)], [(356, 256, 256)], [(612, 88, 512)], [(100, 1, 600)]
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [str(dtype) for dtype in PACKED])
def test_a_rows_logits_do_not_depend_on_the_width_of_its_pass(dtype: str, tmp_path: Path) -> None:
    """To the bit in bf16: greedy text is the same with and without drafts, alone or in a batch. Usual head sizes.

    In fp32 with several threads the library sums wide passes in another order: last bits differ there.
    """

    def check(got: torch.Tensor, expected: torch.Tensor, label: object) -> None:
        same = torch.equal(got, expected)
        assert same or (dtype == "torch.float32" and float((got - expected).abs().max()) < 2e-5), label

    sizes = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    save_hf("llama", tmp_path, intermediate_size=1184, max_position_embeddings=512, **sizes)
    name = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[dtype]
    session = TorchSession(load_checkpoint(str(tmp_path)), dtype=name, device="cpu")
    start, end = 180, 460  # the kernel sums keys differently from 192, 256, 320 and 384 on
    text = np.random.default_rng(0).integers(0, NUM_TOKENS, end).tolist()
    prompt, plain = session.open(), torch.empty(0)
    session.extend([Feed(prompt, text[:start])])
    for width in (1, 2, 3, 6, 9, 16, 37):
        seq = session.fork(prompt, start)
        pieces = [text[first : min(first + width, end)] for first in range(start, end, width)]
        rows = torch.cat([session.extend([Feed(seq, piece, len(piece))]).logits for piece in pieces])
        plain = rows if width == 1 else plain
        check(rows, plain, width)

    seqs = [session.fork(prompt, start) for _ in range(5)]
    while feeds := [
        Feed(seq, text[at : at + 2 * index + 1], min(2 * index + 1, end - at))
        for index, seq in enumerate(seqs)
        if (at := session.length(seq)) < end
    ]:
        begins = [session.length(feed.seq) - start for feed in feeds]
        expected = [plain[begin : begin + feed.num_logits] for begin, feed in zip(begins, feeds, strict=True)]
        check(session.extend(feeds).logits, torch.cat(expected), "batch")


def test_attention_sees_whole_blocks_but_no_number_that_the_kernel_halves() -> None:
    assert [attended_len(length) for length in (1, 64, 65, 192, 193, 384, 385, 512)] == [
        64, 64, 128, 192, 384, 384, 448, 512
    ]  # fmt: skip
    assert [attended_len(512 + length) for length in (1, 192, 300, 512)] == [576, 704, 896, 1024]
