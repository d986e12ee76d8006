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
        ("Stub process 'octavo_0' is not healthy.", errors.Unavailable),
        ("Failed to process the request(s) for model 'octavo_0'", errors.ServerError),
        ("unable to find data for input tensor 'messages'", errors.InvalidRequest),
    ],
)
def test_a_refusal_without_a_status_is_told_by_its_words(message, kind):
    assert type(error_from_message(message)) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARG", errors.InvalidRequest),
        ("UNAVAILABLE", errors.Unavailable),
        ("CANCELLED", errors.RequestCancelled),
        ("INTERNAL", errors.ServerError),
    ],
)
def test_a_code_that_opens_a_message_is_the_kind_of_error_and_no_part_of_its_text(code, kind):
    error = error_from_message(f"{code}: top_k is 7: too many")
    assert type(error) is kind
    assert str(error) == "top_k is 7: too many"


def test_every_exception_has_one_root():
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(kind, errors.OctavoClientError) for kind in kinds)
    assert len(kinds) == 7
