from semdiag_files import InputError, unknown_name


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known():
    error = unknown_name("attention", "top-k", ["full", "topk"])
    assert isinstance(error, InputError)
    assert str(error) == "Unknown attention 'top-k'. Did you mean 'topk'? Known: full, topk."


def test_a_name_like_no_other_gets_no_suggestion():
    assert str(unknown_name("task", "zzz", iter(["parity"]))) == "Unknown task 'zzz'. Known: parity."


def test_a_name_of_several_lines_is_quoted_on_one():
    assert "\n" not in str(unknown_name("task", "a\nb", ["parity"]))
