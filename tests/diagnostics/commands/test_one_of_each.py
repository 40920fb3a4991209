"""What commands and pages say of one sample, one head or one pair: no plural after a 1."""

import html
import re

import pytest

from semdiag.measuring.words import counted

_PLURAL = re.compile(r"(?<![.\d])1 (?!is\b|has\b|costs\b|keeps\b|holds\b|does\b|nats\b)[a-z]+s\b")


@pytest.mark.parametrize(
    ("number", "noun", "said"),
    [(1, "sample", "1 sample"), (0, "key", "0 keys"), (2, "query", "2 queries"), (15_250, "row", "15,250 rows")],
)
def test_numbers_agree_with_their_nouns(number, noun, said):
    assert counted(number, noun) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["report", "k-sweep --rerun", "mask-stability --noise 0.01", "landscape --grid 3", "separation"]
)
def test_one_sample_is_no_plural(words, run_semdiag, tiny_runs, here):
    command, *others = words.split()
    outcome = run_semdiag(command, tiny_runs.topk, *others, "--samples", 1, "--figures", "none", "--out", "page")
    assert outcome.code == 0, outcome.err
    page = re.sub(r"<[^>]+>", " ", html.unescape((here / "page/index.html").read_text(encoding="utf-8")))
    for text in (outcome.out, outcome.err, page):
        assert not re.findall(f".{{,60}}(?:{_PLURAL.pattern})", " ".join(text.split()))
