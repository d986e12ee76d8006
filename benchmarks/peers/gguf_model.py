"""The demo checkpoint as a bfloat16 GGUF file: the same weights, as llama.cpp reads them."""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from octavo.local.demo_model import demo_gguf

MOSTLY_BF16 = 32
"""The file type of bfloat16, as GGUF numbers them."""
_OWN_FIELDS = ("GGUF.", "general.architecture", "general.file_type")


def write_bfloat16_gguf(path: Path) -> None:
    """Write the demo model's GGUF again with its matrices dequantised and rounded to bfloat16."""
    reader = GGUFReader(demo_gguf())
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_file_type(MOSTLY_BF16)
    for name, field in reader.fields.items():
        if not name.startswith(_OWN_FIELDS):
            kind, *of = field.types
            item = of[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=item)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            rounded = quantize(values, GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, rounded, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
