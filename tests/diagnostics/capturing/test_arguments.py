"""Arguments that are no whole numbers are refused by name."""

import numpy as np
import pytest

from semdiag.capturing.batches import as_whole_number
from semdiag_files import InputError


@pytest.mark.parametrize("value", [3, np.int64(3)])
def test_whole_numbers_are_taken(value):
    found = as_whole_number(value, "samples", 1)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [2.5, "3", None, True, [3]])
def test_others_are_refused(value):
    with pytest.raises(InputError, match=r"^samples must be a whole number\. Got "):
        as_whole_number(value, "samples", 1)


def test_what_is_too_small_is_refused():
    with pytest.raises(InputError, match=r"^samples must be at least 1\. Got 0\.$"):
        as_whole_number(0, "samples", 1)
