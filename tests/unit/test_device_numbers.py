"""The option that names the ranks' devices is read whole or refused by name."""

import pytest

from octavo.device_numbers import read_device_numbers
from octavo.errors import ConfigError

NO_LISTS = ("", "a", "0,", "0, 1", "-1,0", "0;1", "cuda:0,cuda:1", "٣,1", "0,1\n", "1000")


def test_numbers_are_those_of_the_ranks_in_order():
    assert read_device_numbers("3,0,12", 3) == (3, 0, 12)
    assert read_device_numbers("7", 1) == (7,)


@pytest.mark.parametrize(
    ("text", "num_ranks", "allowed"),
    [
        *((text, 2, "numbers of CUDA devices, joined by commas") for text in NO_LISTS),
        ("0,1,0", 3, "different numbers, as ranks cannot share a device"),
        ("0,00", 2, "different numbers, as ranks cannot share a device"),
        ("0,1", 1, "one number, as there is one rank"),
        (
            "0,1",
            4,
            "4 numbers, one for each rank of tensor_parallel_size times pipeline_parallel_size",
        ),
    ],
)
def test_what_names_no_device_for_each_rank_is_refused(text, num_ranks, allowed):
    with pytest.raises(ConfigError) as error:
        read_device_numbers(text, num_ranks)
    assert str(error.value) == f"option devices is {text!r} but must be {allowed}"
