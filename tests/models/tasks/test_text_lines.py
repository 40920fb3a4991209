"""Files that nobody has checked."""

import hashlib

import pytest

from semdiag_files import InputError
from semdiag_models.text import read_lines, split_lines


@pytest.fixture
def file(tmp_path):
    """Call with bytes: a file that holds them."""

    def make(content):
        path = tmp_path / "some.txt"
        path.write_bytes(content)
        return path

    return make


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_lines_are_stripped_and_blank_ones_left_out(file, ends):
    content = ends.join([b"  one line ", b"", b"\t", "zw\u00f6lf\u2028Boxk\u00e4mpfer".encode(), b"last"])
    lines, digest = read_lines(file(content))
    assert lines == ["one line", "zw\u00f6lf\u2028Boxk\u00e4mpfer", "last"]
    assert digest == hashlib.sha256(content).hexdigest()


def test_a_byte_order_mark_is_no_text(file):
    assert read_lines(file("\ufeffone".encode()))[0] == ["one"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: there is no line with text in it."),
        (b" \n\t\r\n", "is empty: there is no line with text in it."),
        (b"good\ncaf\xe9 au lait\n", "is not UTF-8: byte 0xe9 in line 2. Convert it, "),
        (b"\x7fELF\0\0\1", "is not a text: it holds zero bytes."),
        ("text".encode("utf-16"), "is not a text: it holds zero bytes."),
    ],
)
def test_what_is_no_text_is_refused(file, content, message):
    with pytest.raises(InputError) as refused:
        read_lines(file(content))
    assert message in str(refused.value)
    assert "some.txt" in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.txt does not exist\.$"):
        read_lines(tmp_path / "nowhere.txt")
    with pytest.raises(InputError, match=r"is a folder, not a file\.$"):
        read_lines(tmp_path)


@pytest.mark.parametrize(("n", "held_out"), [(2, 1), (9, 1), (19, 1), (20, 2), (1005, 100)])
def test_the_last_tenth_of_the_lines_is_held_out(tmp_path, n, held_out):
    lines = [str(i) for i in range(n)]
    train, holdout = split_lines(tmp_path, lines)
    assert train + holdout == lines
    assert len(holdout) == held_out


def test_one_line_cannot_be_split(tmp_path):
    with pytest.raises(InputError, match="has one line"):
        split_lines(tmp_path / "a.txt", ["one"])
