"""The plan for several GPUs is the arithmetic of its page, and the page is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.doc_tables import markers
from benchmarks.gpu.rank_plan import (
    H100,
    H200,
    LLAMA_8B,
    LLAMA_70B,
    Gpu,
    Grid,
    Model,
    added_bytes,
    decode_plan,
    num_sums,
    sliced_exchange_s,
    stage_step,
    sum_bytes,
)
from benchmarks.gpu_scaling import PAGE, tables

DOCS = Path(__file__).parents[2] / "docs"
#: A layer of 8 x (8 + 2 x 4 + 8 + 3 x 16) = 576 weights, and a vocabulary of 10 x 8 = 80.
TINY = Model("tiny", 2, 8, 16, 4, 2, 10)
SLOW = Gpu("slow", 10_000.0, 1000.0, 1e6, 100.0)


def test_the_page_holds_what_the_script_writes():
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    for name, table in tables().items():
        assert f"\n{table}\n".join(markers(name)) in page, name


def test_models_have_as_many_weights_as_they_are_called_by():
    for model, billions in ((LLAMA_8B, 8.03), (LLAMA_70B, 70.6)):
        tables_of_words = 2 * model.vocab * model.hidden
        total = model.num_layers * model.layer_numbers + tables_of_words
        assert total / 1e9 == pytest.approx(billions, abs=0.05)


def test_one_gpu_reads_all_and_exchanges_nothing():
    step = stage_step(SLOW, TINY, Grid(), num_tokens=1, kv_tokens=7, num_rows=1)
    assert step.weight_bytes == (2 * 576 + 80) * 2
    assert step.kv_bytes == 7 * 2 * 2 * 2 * 2 * 2
    assert (step.sent_bytes, step.exchange_s, step.adding_s) == (0, 0, 0)
    assert step.floor_s == pytest.approx((step.weight_bytes + step.kv_bytes) / 1000.0)
    assert step.launch_s == pytest.approx(20 * 5e-6)


def test_a_tensor_group_divides_what_it_reads_and_sends_its_terms_to_each_other():
    step = stage_step(SLOW, TINY, Grid(4), num_tokens=3, kv_tokens=7, num_rows=2)
    assert step.weight_bytes == (2 * 576 + 80) * 2 / 4
    assert step.kv_bytes == 7 * 2 * 2 * 1 * 2 * 2, "two KV heads are held twice each"
    assert step.sent_bytes == 5 * 3 * (3 * 8 * 2)
    sums_s = 5 * (10e-6 + 3 * 3 * 8 * 2 / 100)
    logits_s = 10e-6 + 3 * 2 * 10 / 4 * 2 / 100
    assert step.exchange_s == pytest.approx(sums_s + logits_s)
    assert step.adding_s == pytest.approx(5 * added_bytes(3, 8, 4) / 1000)
    assert step.launch_s == pytest.approx((20 + 5 * 6) * 5e-6)


def test_products_count_where_they_take_longer_than_weights():
    slow_products = Gpu("", 1e9, 1e12, 1000.0, 1e9)
    step = stage_step(slow_products, TINY, Grid(), num_tokens=10, kv_tokens=0, num_rows=1)
    assert step.memory_s == pytest.approx((2 * 10 * 2 * 576 + 2 * 80) / 1000)


def test_adding_reads_and_writes_in_float32():
    # Read 2 and write 4; read 4 and 2 and write 4; read 4 and write 2.
    assert added_bytes(3, 8, 2) == 24 * (6 + 10 + 6)
    assert added_bytes(3, 8, 1) == 0


def test_bytes_are_those_that_ranks_count():
    assert num_sums(2, is_first_stage=True) == 5
    assert num_sums(2, is_first_stage=False) == 4
    assert sum_bytes(13, 60, 4, item_bytes=4) == 3 * 13 * 60 * 4


def test_sums_by_slices_send_less_from_four_ranks_on():
    def sent_s(tp):
        return sliced_exchange_s(SLOW, TINY, tp, 1000) - 5 * 2 * {2: 8e-6, 4: 10e-6, 8: 14e-6}[tp]

    for tp in (2, 4, 8):
        by_terms_s = 5 * sum_bytes(1000, 8, tp) / 100
        assert sent_s(tp) == pytest.approx(by_terms_s * 2 / tp)


def test_one_sequence_passes_all_stages_and_many_fill_them():
    one, many = (decode_plan(H200, LLAMA_8B, Grid(1, 2), batch, 1024) for batch in (1, 32))
    assert one.tokens_per_s == pytest.approx(0.85 / (2 * one.step.floor_s))
    assert many.tokens_per_s == pytest.approx(16 * 0.75 / many.step.floor_s)


def test_launches_bound_several_gpus_alone():
    plan = decode_plan(H200, LLAMA_8B, Grid(8), 1, 1024)
    assert plan.tokens_per_s == pytest.approx(1 / plan.step.launch_s)
    assert plan.recorded_tokens_per_s == pytest.approx(0.85 / plan.step.floor_s)
    alone = decode_plan(H200, LLAMA_8B, Grid(), 1, 1024)
    assert alone.tokens_per_s == alone.recorded_tokens_per_s


@pytest.mark.parametrize(
    ("gpu", "grid", "fits"),
    [(H200, Grid(), False), (H200, Grid(2), True), (H100, Grid(2), False), (H100, Grid(4), True)],
)
def test_a_model_that_has_no_room_is_said_so(gpu, grid, fits):
    assert decode_plan(gpu, LLAMA_70B, grid, 32, 1024).fits is fits
