"""Damaged GGUF files are refused where they are damaged, at once, whatever sizes they claim."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFWriter

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.model.gguf_checkpoint import convert_gguf
from octavo.model.gguf_header import read_header

MakeModel = Callable[..., Any]
MakeGguf = Callable[..., Path]
HUGE = 2**60


def number(value: int, form: str = "<Q") -> bytes:
    return struct.pack(form, value)


def text(value: str) -> bytes:
    return number(len(value)) + value.encode()


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + number(version, "<I") + number(tensors) + number(keys)


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(map(number, sizes))
    return text(name) + number(len(sizes), "<I") + dims + number(kind, "<I") + number(offset)


KEY = text("a.key")
#: What a file holds, and what is said of it.
DAMAGED = {
    "no letters": (b"GGML" + header()[4:], "does not begin with the letters GGUF"),
    "version 1": (header(version=1), "GGUF file of version 1; allowed are little-endian files"),
    "version 4": (header(version=4), "of version 4"),
    "big-endian": (b"GGUF" + number(3, ">I") + bytes(16), "of version big-endian, version 3"),
    "keys": (header(keys=HUGE), rf"key 1 of {HUGE:,}"),
    "tensors": (header(tensors=HUGE), rf"tensor 1 of {HUGE:,}"),
    "a key": (header(keys=1) + number(HUGE), rf"a text of {HUGE:,} bytes \(at key 1 of 1\)"),
    "a text": (
        header(keys=1) + KEY + number(8, "<I") + number(HUGE),
        r"a text of .* \(at key 'a.key'\)",
    ),
    "a list": (header(keys=1) + KEY + struct.pack("<IIQ", 9, 4, HUGE), f"it has {HUGE:,} items"),
    "short list": (header(keys=1) + KEY + struct.pack("<IIQ", 9, 4, 99), "before byte 4"),
    "lists of lists": (header(keys=1) + KEY + struct.pack("<IIQ", 9, 9, 1), "arrays of arrays"),
    "a kind": (header(keys=1) + KEY + number(77, "<I"), "its kind, 77, is not known"),
    "not UTF-8": (header(keys=1) + number(1) + b"\xff", "a text that is not UTF-8"),
    "same key": (header(keys=2) + (KEY + number(7, "<I") + b"\1") * 2, "twice .at key 'a.key'"),
    "alignment": (
        header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0),
        "general.alignment is 0, no power of two",
    ),
    "a tensor": (header(1) + tensor("t", HUGE, HUGE), r"before byte .* \(at tensor 't'\)"),
    "dimensions": (header(1) + tensor("t", 1, 1, 1, 1, 1), "it has 5 dimensions"),
    "no dimension": (header(1) + tensor("t"), "it has 0 dimensions"),
    "no values": (header(1) + tensor("t", 0), r"its shape is \[0\]"),
    "half a block": (header(1) + tensor("t", 33, kind=8), r"\[33\], which Q8_0 cannot have"),
    "a type": (header(1) + tensor("t", 1, kind=99), "its type, 99, is not known"),
    "same tensor": (header(2) + tensor("t", 1) * 2 + bytes(64), "twice .at tensor 't'"),
    "overlap": (header(2) + tensor("t", 1) + tensor("u", 1) + bytes(64), "within another's data"),
    "offset": (header(1) + tensor("t", 1, offset=4) + bytes(64), "its offset 4 is not aligned"),
    "far offset": (header(1) + tensor("t", 1, offset=HUGE) + bytes(64), "it ends at byte"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_is_said_and_costs_no_memory(name: str, tmp_path: Path) -> None:
    content, reason = DAMAGED[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=reason):
        read_header(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**23


def test_a_file_cut_off_anywhere_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    content = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 9000, 37), len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="is not a whole GGUF file"):
            read_header(path)


def drop(model: Any) -> None:
    del model.model.layers[1].mlp.up_proj.weight


def bend(model: Any) -> None:
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight.data = layer.weight.data[:12]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop, "missing: blk.1.ffn_up.weight"),
        (bend, r"wrong shape: blk.1.attn_k.weight \[12, 48\] instead of \[16, 48\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named_as_the_file_names_them(
    change: Callable[[Any], None],
    reason: str,
    make_model: MakeModel,
    make_gguf: MakeGguf,
    tmp_path: Path,
) -> None:
    model = make_model("qwen2")
    change(model)
    path = make_gguf(model=model)
    with pytest.raises(ConfigError, match=reason):
        convert_gguf(path, tmp_path)
    checked = CliRunner().invoke(main, ["check", str(path), "--device", "cpu"])
    assert checked.exit_code == 1
    assert reason.partition("[")[0].rstrip("\\ ") in checked.output


def test_a_type_that_cannot_be_dequantised_is_refused_with_its_tensor(
    make_gguf: MakeGguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = GGUFWriter.add_tensor

    def add_float64(self: Any, name: str, values: Any, raw_dtype: Any) -> None:
        kind = GGMLQuantizationType.F64 if name == "output_norm.weight" else raw_dtype
        values = values.astype("f8") if kind != raw_dtype else values
        add(self, name, values, raw_dtype=kind)

    monkeypatch.setattr(GGUFWriter, "add_tensor", add_float64)
    with pytest.raises(
        ConfigError, match=r"'output_norm\.weight' is stored as F64, which gguf can"
    ):
        convert_gguf(make_gguf(), tmp_path)


@pytest.fixture
def parts(make_gguf: MakeGguf, tmp_path: Path) -> list[Path]:
    """Split a file as llama.cpp's own tool does: the first part has no tensors here."""
    whole = make_gguf({"split.count": 3, "split.tensors.count": 39, "split.no": 0})
    tensors = list(read_header(whole).tensors.values())
    (tmp_path / "parts").mkdir()
    paths = [tmp_path / "parts" / f"tiny-0000{i + 1}-of-00003.gguf" for i in range(3)]
    content = bytearray(whole.read_bytes())
    content[8:16] = number(0)
    paths[0].write_bytes(content[: content.index(text("token_embd.weight"))])
    for path, own in zip(paths[1:], (tensors[:20], tensors[20:]), strict=True):
        writer = GGUFWriter(path, "llama")
        for each in own:
            writer.add_tensor(each.name, each.data.view("f4").reshape(each.shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_parts_are_one_file_and_each_is_needed(
    parts: list[Path], make_gguf: MakeGguf, tmp_path: Path
) -> None:
    for name in ("whole", "split"):
        (tmp_path / name).mkdir()
    convert_gguf(make_gguf(), tmp_path / "whole")
    convert_gguf(parts[0], tmp_path / "split")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "split")]
    assert weights[0] == weights[1]
    with pytest.raises(ConfigError, match="is part 2 of 3; name the first one"):
        convert_gguf(parts[1], tmp_path)
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ConfigError, match=r"GGUF tensor '.*' is in two parts of"):
        convert_gguf(parts[0], tmp_path)
    parts[2].unlink()
    with pytest.raises(ConfigError, match=r"00003-of-00003.gguf does not exist"):
        convert_gguf(parts[0], tmp_path)
    alone = parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match=r"says it has 3 parts with 39 tensors, but there are 1"):
        convert_gguf(alone, tmp_path)
