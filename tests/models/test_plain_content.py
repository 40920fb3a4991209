"""Containers of a file that hold themselves, or each other so often that going through them would never end."""

import pytest
import torch

from semdiag_files import InputError
from semdiag_models.checkpoint import check_plain, read_plain


def themselves():
    """Containers that hold themselves: in a list, a dictionary, and through each other."""
    alone, named, one, other = [], {}, [], {}
    alone += [alone, alone]
    named["a"] = named
    one.append(other)
    other["a"] = one
    return [alone, named, one, {"tokens": torch.zeros(2), "x": (alone,)}]


@pytest.mark.parametrize("at", range(4))
def test_a_container_that_holds_itself_is_refused_at_once(tmp_path, at):
    """Going through a list of 60 times itself never ended."""
    torch.save(themselves()[at], tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt is not a checkpoint, .* \(containers that (contain|are nested)"):
        read_plain(tmp_path / "x.pt")


@pytest.mark.parametrize("make", [lambda inner: [inner] * 10, lambda inner: {str(at): inner for at in range(10)}])
def test_containers_that_hold_each_other_too_often_are_refused_at_once(tmp_path, make):
    content = torch.zeros(1)
    for _ in range(40):
        content = make(content)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match="containers that contain each other too often"):
        read_plain(tmp_path / "x.pt")


@pytest.mark.slow
def test_what_is_held_twice_or_is_long_is_read(tmp_path):
    shared = [torch.zeros(2), list(range(1000))]
    content = {"a": shared, "b": [shared, shared], "long": list(range(10**5)), "deep": [[[[]]]]}
    torch.save(content, tmp_path / "x.pt")
    assert list(read_plain(tmp_path / "x.pt")) == list(content)


def test_depth_is_that_of_the_longest_way_down():
    shared = inner = []
    for _ in range(30):
        inner.append([])
        inner = inner[0]
    outer = shared
    for _ in range(30):
        outer = [outer]
    check_plain(shared)
    with pytest.raises(Exception, match="nested too deeply"):
        check_plain([shared, outer])
