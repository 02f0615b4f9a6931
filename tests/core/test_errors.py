"""The error tree is as drawn, and broken promises of the caller are ValueErrors too."""

import inspect

import pytest

from kv_core import errors
from kv_core.errors import CallerError, CapacityError, FerryError, PeerError


def test_the_tree_is_complete():
    members = {value for _, value in inspect.getmembers(errors, inspect.isclass)}
    assert members == {FerryError, CallerError, CapacityError, PeerError}
    assert all(issubclass(member, FerryError) for member in members)
    assert all(member.__name__ in (errors.__doc__ or "") for member in members)


def test_a_broken_promise_of_the_caller_is_a_value_error():
    with pytest.raises(ValueError, match="ours=1"):
        raise CallerError("ours=1, theirs=2")
