"""The GGUF reader: what it reads, how fast it opens, and that no broken file gets past it."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from block_files import random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import write_gguf

from paceline.errors import ModelFormatError, ModelNotFoundError, PacelineError
from paceline.models.load.codes import LAYOUTS
from paceline.models.load.dequant import SUPPORTED, dequantize
from paceline.models.load.gguf import BLOCK_FORMATS, GGUFFile

RNG = np.random.default_rng(7)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "small.gguf",
        metadata={"general.name": "tiny", "tokenizer.ggml.tokens": ["a", "é", "", "😀"],
                  "tokenizer.ggml.token_type": [1, 1, 3, 4], "tokenizer.ggml.add_bos_token": True},
        tensors={"token_embd.weight": (RNG.normal(size=(8, 32)), "Q8_0"),
                 "output_norm.weight": (RNG.normal(size=32), "F32"),
                 "blk.0.ffn_gate.weight": (random_blocks(RNG, "Q4_K", 2, 512), "Q4_K"),
                 "blk.0.ffn_down.weight": (random_blocks(RNG, "IQ4_NL", 3, 64), "IQ4_NL"),
                 "blk.0.ffn_up.weight": (RNG.normal(size=(64, 32)), "Q4_1")})


def test_metadata_values_keep_their_types(small_file: Path) -> None:
    with GGUFFile(small_file) as file:
        assert file.get("general.name") == "tiny"
        assert file.get("llama.block_count") == 1
        assert file.get("llama.attention.layer_norm_rms_epsilon") == 1e-5
        assert file.get("tokenizer.ggml.add_bos_token") is True
        assert file.get("tokenizer.ggml.tokens") == ["a", "é", "", "😀"]
        assert list(file.get("tokenizer.ggml.token_type")) == [1, 1, 3, 4]
        assert file.length("tokenizer.ggml.tokens") == 4
        assert file.length("general.name") is None
        assert file.get("no.such.key", "else") == "else"
        with pytest.raises(ModelFormatError, match=r"no\.such\.key"):
            file.metadata.text("no.such.key")


def test_tensors_are_read_only_views_in_torch_order(small_file: Path) -> None:
    file = GGUFFile(small_file)
    info = file.tensors["blk.0.ffn_up.weight"]
    assert (info.shape, info.format.name) == ((64, 32), "Q4_1")
    data = file.data(info)
    assert data.shape == (64, 20) and not data.flags.writeable
    before = data.copy()
    file.close()
    assert np.array_equal(data, before), "views outlive close()"


def test_agrees_with_the_reference_reader(small_file: Path) -> None:
    reference = gguf.GGUFReader(small_file)
    file = GGUFFile(small_file)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert info.start == tensor.data_offset
        assert file.data(info).tobytes() == tensor.data.tobytes()


def test_block_sizes_agree_with_the_reference() -> None:
    for code, block in BLOCK_FORMATS.items():
        kind = gguf.GGMLQuantizationType(code)
        assert (block.name, block.elements, block.bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


QUANTIZABLE = [kind for kind in SUPPORTED if not kind.endswith("_K") and not kind.startswith("IQ")]
"""Those the reference can make blocks of; of the others it reads any bytes (below)."""


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_dequantisation_is_bit_equal_to_the_reference(kind: str) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    values = (RNG.normal(size=(37, 96)) * 10.0 ** RNG.integers(-4, 4, size=(37, 1))).astype(np.float32)
    values[0] = 0.0
    packed = gguf.quants.quantize(values, quantized)
    expected = gguf.quants.dequantize(packed, quantized)
    found = dequantize(packed.view(np.uint8).reshape(37, -1), kind, (37, 96))
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy().view(np.int32), expected.astype(np.float32).view(np.int32))
    half = dequantize(packed.view(np.uint8).reshape(37, -1), kind, (37, 96), dtype=torch.float16)
    assert torch.equal(half, found.to(torch.float16))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_any_block_dequantises_like_the_reference(kind: str) -> None:
    """Random bytes: every code, every packed scale, and scales of every sign and size, infinite ones as well."""
    layout = LAYOUTS[kind]
    packed = RNG.integers(0, 256, size=(500, 3 * layout.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    found = dequantize(packed, kind, expected.shape).numpy()
    same = (found.view(np.int32) == expected.view(np.int32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all()


def test_layouts_have_the_sizes_of_the_format() -> None:
    sizes = {block.name: (block.elements, block.bytes) for block in BLOCK_FORMATS.values()}
    assert {kind: (layout.elements, layout.size) for kind, layout in LAYOUTS.items()}.items() <= sizes.items()


def test_more_blocks_than_are_read_at_once() -> None:
    packed = RNG.integers(0, 60, size=(2 * 2050, 210), dtype=np.uint8)
    found = dequantize(packed, "Q6_K", (4100, 256)).numpy()
    assert np.array_equal(found, gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q6_K))


def test_an_unsupported_type_names_tensor_and_type_and_what_is_supported() -> None:
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up.*IQ2_XS.*F32, F16, BF16, Q8_0, Q4_0, Q4_1.*Q4_K.*Q6_K"):
        dequantize(np.zeros((1, 74), np.uint8), "IQ2_XS", (1, 256), name="blk.0.ffn_up")


def raw_tensor(path: Path, name: str, shape: tuple[int, ...], code: int, size: int) -> Path:
    """A file with one tensor of `size` zero bytes, said to be of `shape` and type `code`."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    info = struct.pack("<Q", len(name)) + name.encode() + dims + struct.pack("<IQ", code, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(size))
    return path


@pytest.mark.parametrize(("shape", "code", "size", "hint"), [
    ((2, 256), 77, 512, r"'blk\.0\.x'.*unknown type 77.*Q4_K.*Q6_K"),
    ((2, 128), 12, 144, r"'blk\.0\.x'.*rows of 128 values, which Q4_K cannot hold \(blocks of 256\)"),
    ((2, 48), 20, 54, r"'blk\.0\.x'.*rows of 48 values, which IQ4_NL cannot hold \(blocks of 32\)"),
    ((2, 512), 14, 4 * 210 - 1, r"truncated: tensor 'blk\.0\.x' needs"),
])
def test_tensors_that_cannot_be_are_named(tmp_path: Path, shape: tuple[int, ...], code: int, size: int,
                                          hint: str) -> None:
    with pytest.raises(ModelFormatError, match=hint):
        GGUFFile(raw_tensor(tmp_path / "m.gguf", "blk.0.x", shape, code, size))
    good = raw_tensor(tmp_path / "m.gguf", "blk.0.x", (2, 512), 14, 4 * 210)
    assert GGUFFile(good).tensors["blk.0.x"].nbytes == 4 * 210


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf"):
        GGUFFile(tmp_path / "none.gguf")


@pytest.mark.parametrize(("content", "hint"), [
    (b"", "empty"), (b"PK\x03\x04 something else", "not a GGUF file"),
    (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big endian"),
    (b"GGUF" + struct.pack("<I", 3), "ends inside the header"),
])
def test_what_is_not_a_readable_gguf_says_why(tmp_path: Path, content: bytes, hint: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=hint):
        GGUFFile(path)


def test_truncated_data_names_the_tensor(small_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"truncated: tensor 'blk\.0\.ffn_up\.weight'.*download it again"):
        GGUFFile(path)


def test_truncated_metadata_names_the_key(small_file: Path, tmp_path: Path) -> None:
    content = small_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:content.index(b"tokenizer.ggml.tokens") + 60])
    with pytest.raises(ModelFormatError, match=r"'tokenizer\.ggml\.tokens'"):
        GGUFFile(path)


@given(cut=st.floats(0, 0.999))
def test_every_truncation_is_a_format_error(small_file: Path, tmp_path_factory: pytest.TempPathFactory,
                                            cut: float) -> None:
    content = small_file.read_bytes()
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    # The last tensor ends before the final padding; cut inside what is used.
    path.write_bytes(content[:int((len(content) - 32) * cut)])
    with pytest.raises(ModelFormatError):
        GGUFFile(path)


@given(data=st.data())
@settings(max_examples=100)
def test_damaged_headers_never_raise_anything_else(small_file: Path, tmp_path_factory: pytest.TempPathFactory,
                                                   data: st.DataObject) -> None:
    content = bytearray(small_file.read_bytes())
    header = GGUFFile(small_file).header_bytes
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
        for key in file.keys():  # noqa: SIM118
            file.get(key)
        for info in file.tensors.values():
            dequantize(file.data(info), info.format.name, info.shape, name=info.name)
    except PacelineError:
        pass
