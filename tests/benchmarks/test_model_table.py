"""The table of models lists everything that code and tests know."""

from __future__ import annotations

from pathlib import Path

from benchmarks.model_table import Row, table
from benchmarks.tiny_image_models import IMAGES
from benchmarks.tiny_models import NATIVE, PAGED, STATIC

from octavo.model.families import FAMILIES
from octavo.model.image_models import IMAGE_MODELS

PAGE = Path(__file__).parents[2] / "docs" / "model-table.md"


def rows_of(page: str) -> list[list[str]]:
    _head, _rule, *lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_native_family_is_tried():
    assert {fields.get("model_type", name) for name, fields in NATIVE.items()} == set(FAMILIES)
    assert set(IMAGES) == set(IMAGE_MODELS)


def test_the_page_lists_every_model_that_is_tried():
    ways = [way for _, way, *_ in rows_of(PAGE.read_text())]
    assert [ways.count(way) for way in ("native", "transformers", "static")] == [
        len(NATIVE) + len(IMAGES),
        len(PAGED),
        len(STATIC),
    ]
    native = [name for name, way, *_ in rows_of(PAGE.read_text()) if way == "native"]
    models = [*FAMILIES.values(), *IMAGE_MODELS.values()]
    assert {name.split()[0] for name in native} == {model.architecture for model in models}
    assert len(set(native)) == len(native)


def test_all_that_is_paged_says_what_transformers_says():
    for name, way, tokens, chunks, bits, int8, *_ in rows_of(PAGE.read_text()):
        assert tokens == "yes", name
        if way != "static":
            assert (chunks, bits, int8) == ("yes",) * 3, name


def test_a_row_has_a_cell_for_each_thing_that_is_tried():
    row = Row("SomeForCausalLM", "native", "yes", "yes", "yes", "no", "tensor", "yes")
    assert rows_of(table([row])) == [
        ["SomeForCausalLM", "native", "yes", "yes", "yes", "no", "tensor", "yes"]
    ]
