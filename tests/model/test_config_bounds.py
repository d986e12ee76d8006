"""Numbers that no model has are refused before transformers makes anything by them."""

import json

import pytest

from octavo.errors import ConfigError
from octavo.model.loader import read_model_config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 4097}, "n_layer = 4097 but must have at most 4,096"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 but must have at most 4,096"),
        ({"decoder_layers": 10**6}, "decoder_layers = 1000000 but must have at most 4,096"),
        ({"text_config": {"num_layers": 5000}}, "num_layers = 5000 but must have at most 4,096"),
        ({"d_ff": 2**63}, "d_ff = 9223372036854775808 but must have at most 9,223,372,036"),
        ({"sizes": [[-(2**63)]]}, "sizes = -9223372036854775808 but must have at most 9,223"),
        ({"architectures": "GPT2LMHeadModel"}, "'GPT2LMHeadModel' but must have a list of names"),
        ({"architectures": {"a": 1}}, "architectures = {'a': 1} but must have a list of names"),
        ({"architectures": [1]}, "architectures = [1] but must have a list of names"),
    ],
)
def test_what_no_model_has_is_refused_by_name(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **change}))
    with pytest.raises(ConfigError) as error:
        read_model_config(tmp_path, trust_remote_code=False)
    assert message in str(error.value)


def test_what_is_large_in_real_configs_is_taken(tmp_path):
    config = {"n_layer": 4096, "max_position_embeddings": 2**62, "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path, trust_remote_code=False) == config
