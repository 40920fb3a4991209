import pytest

from semdiag_files import InputError
from semdiag_models.tasks import find_task


@pytest.mark.parametrize("text", ["1001", "1 0 0 1", " 10\n01 "])
def test_blanks_between_one_character_symbols_do_not_matter(text):
    assert find_task("parity").parse(text) == [1, 0, 0, 1]


def test_longer_symbols_are_separated_by_blanks():
    assert find_task("listops").parse(" [MAX 3 8\t]\n") == [11, 3, 8, 14]
    with pytest.raises(InputError, match="'\\[MAX3' is not a symbol of listops"):
        find_task("listops").parse("[MAX3 8 ]")


def test_an_unknown_symbol_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"^'2' is not a symbol of parity\. Its symbols are: 0 1\.$"):
        find_task("parity").parse("1021")


def test_pad_comes_after_the_symbols():
    assert find_task("parity").pad_id == 2
    assert find_task("parity").vocabulary_size == 3
