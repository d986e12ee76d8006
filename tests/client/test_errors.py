import pytest

import octavo_client.errors as errors
from octavo_client.errors import error_from_message, error_from_status


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT", errors.InvalidRequest),
        ("RESOURCE_EXHAUSTED", errors.InvalidRequest),
        ("NOT_FOUND", errors.ModelNotFound),
        ("UNAVAILABLE", errors.Unavailable),
        ("CANCELLED", errors.RequestCancelled),
        ("DEADLINE_EXCEEDED", errors.RequestTimeout),
        ("INTERNAL", errors.ServerError),
        ("UNKNOWN", errors.ServerError),
        ("UNIMPLEMENTED", errors.ServerError),
    ],
)
def test_every_status_has_one_exception_that_keeps_the_message(status, kind):
    error = error_from_status(status, "queue is full")
    assert type(error) is kind
    assert str(error) == "queue is full"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Request for unknown model: 'x' is not found", errors.ModelNotFound),
        (
            "Request for unknown model: 'octavo' has no available versions",
            errors.Unavailable,
        ),
        ("Server is stopping, scheduler has stopped accepting new requests", errors.Unavailable),
        ("unable to find data for input tensor 'messages'", errors.InvalidRequest),
    ],
)
def test_a_refusal_without_a_status_is_told_by_its_words(message, kind):
    assert type(error_from_message(message)) is kind


def test_a_model_whose_process_is_gone_is_unavailable():
    error = error_from_status("INTERNAL", "Stub process 'octavo_0_0' is not healthy.")
    assert type(error) is errors.Unavailable


def test_every_exception_has_one_root():
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(kind, errors.OctavoClientError) for kind in kinds)
    assert len(kinds) == 7
