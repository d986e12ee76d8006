import pytest
import torch

import octavo_kernels
from octavo.model import layers
from octavo.model.layers import Embedding, PackedLinear

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 100, 128, 257, 512)
# The demo model's products, then sizes that fill no vector.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (2048, 512), (7, 13), (33, 50), (64, 1))


def random_linear(dtype, in_features, out_features, with_bias=True):
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator).mul(0.05).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    return weight, bias, torch.randn(max(ROW_COUNTS), in_features, generator=generator).to(dtype)


@pytest.fixture(params=["native", "packed", "plain"])
def layout(request, monkeypatch):
    if request.param != "native":
        monkeypatch.setattr(layers, "pack_weight", lambda weight, bias, **options: None)
    if request.param == "plain":
        monkeypatch.setattr(layers, "_pack", lambda weight: None)
    return request.param


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_with_any_number_of_rows(dtype, shape, with_bias, layout):
    weight, bias, x = random_linear(dtype, *shape, with_bias)
    linear = PackedLinear(weight, bias)
    everything = linear(x)
    for count in ROW_COUNTS:
        assert torch.equal(linear(x[:count]), everything[:count]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_single_row_has_the_bits_it_has_among_many(dtype, layout):
    # Rounding to bfloat16 hides most differences: one row would not show them.
    weight, _, x = random_linear(dtype, 1536, 576)
    linear = PackedLinear(weight)
    everything = linear(x)
    for row in range(0, x.shape[0], 4):
        assert torch.equal(linear(x[row : row + 1])[0], everything[row]), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_at_any_place_among_the_rows(dtype, layout):
    weight, bias, x = random_linear(dtype, 1536, 576)
    linear = PackedLinear(weight, bias)
    everything = linear(x)
    order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x[order]), everything[order])
    for start in (1, 7, 100, 511):
        assert torch.equal(linear(x[start:]), everything[start:]), start


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_the_product_plus_the_bias(dtype, count, layout):
    weight, bias, x = random_linear(dtype, 33, 50)
    result = PackedLinear(weight, bias)(x[:count])
    exact = x[:count].double() @ weight.double().T + bias.double()
    assert result.dtype == dtype
    tolerance = {torch.bfloat16: 2**-8, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_embedding_gives_the_rows_of_its_weight(dtype, is_tied, layout):
    weight, _, _ = random_linear(dtype, 33, 50)
    embedding = Embedding(weight, PackedLinear(weight) if is_tied else None)
    token_ids = torch.tensor([49, 0, 7, 7])
    assert embedding.dtype == dtype
    assert torch.equal(embedding(token_ids), weight[token_ids])


def test_memory_of_a_weight_is_kept_only_where_it_is_not_laid_out_anew(layout):
    weight, _, x = random_linear(torch.float32, 33, 50)
    before = weight.clone()
    linear = PackedLinear(weight)
    assert linear.keeps_weight == (layout == "plain")
    if not linear.keeps_weight:
        weight.fill_(torch.nan)
    assert torch.equal(linear(x), PackedLinear(before)(x))


def test_an_embedding_that_shares_a_packed_weight_keeps_no_plain_one():
    weight, _, _ = random_linear(torch.float32, 33, 50)
    expected, tied = weight.clone(), PackedLinear(weight)
    if tied.native is None:
        pytest.skip("this machine builds no native code")
    embedding = Embedding(weight, tied)
    weight.fill_(torch.nan)
    assert torch.equal(embedding(torch.arange(50)), expected)


def test_on_a_gpu_torchs_own_product_serves_only_who_asks_for_no_determinism():
    def product(device, deterministic):
        return layers.plain_product(torch.device(device), deterministic=deterministic)

    assert product("cuda", True) is octavo_kernels.linear
    assert product("cuda:1", False) is torch.nn.functional.linear
    assert product("cpu", True) is product("cpu", False) is octavo_kernels.linear
