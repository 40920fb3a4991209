"""The tokenizer: repeatable, quiet, and refusing in words of ours."""

import sys

import pytest
import torch

from semdiag_files import InputError
from semdiag_models.text import TOKENIZERS, encode, read_lines, train_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")


@pytest.fixture(scope="module")
def lines(story):
    return read_lines(story)[0]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_training_is_repeatable_silent_and_writes_nothing(lines, kind, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    one, two = (train_tokenizer(lines, kind, 40) for _ in range(2))
    assert one == two
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_are_those_of_the_library_line_by_line(lines, kind):
    model = train_tokenizer(lines, kind, 40)
    pieces = encode(model, 40, lines)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    naive = [processor.encode(line) for line in lines]
    assert pieces.ids.tolist() == [i for line in naive for i in line]
    assert pieces.lengths.tolist() == [len(line) for line in naive]
    assert [processor.decode(line) for line in naive] == lines
    assert not torch.isin(pieces.ids, torch.tensor([0, 1, 2])).any()  # <unk>, <s>, </s>


def test_the_unknown_character_is_id_0(lines):
    model = train_tokenizer(lines, "unigram", 40)
    assert 0 in encode(model, 40, ["the fox \u2603"]).ids.tolist()


def test_lines_longer_than_the_library_reads_are_not_left_out():
    lines = ["a b c", " ".join(["xylophone"] * 1000)]  # 10,000 bytes; SentencePiece skips 4193 and more
    model = train_tokenizer(lines, "bpe", 20)
    assert 0 not in encode(model, 20, ["xylophone"]).ids.tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_vocabulary_too_large_is_refused_with_the_largest_that_works(lines, kind):
    with pytest.raises(InputError, match=r"^--vocabulary 4096 is more than this text supports") as refused:
        train_tokenizer(lines, kind, 4096)
    most = int(str(refused.value).split()[-3])
    encode(train_tokenizer(lines, kind, most), most, lines)
    with pytest.raises(InputError, match=rf"Use --vocabulary {most} or less\.$"):
        train_tokenizer(lines, kind, most + 1)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_vocabulary_too_small_is_refused_with_the_smallest_that_works(lines, kind):
    with pytest.raises(InputError, match=r"^--vocabulary 10 is less than the \d+ this text needs") as refused:
        train_tokenizer(lines, kind, 10)
    least = int(str(refused.value).split()[-3])
    encode(train_tokenizer(lines, kind, least), least, lines)


@pytest.mark.parametrize("vocabulary", [-1, 0, 2, 100_000])
def test_sizes_no_model_has_are_refused(lines, vocabulary):
    with pytest.raises(InputError, match=rf"must lie in 3 … 99999\. Got {vocabulary}\.$"):
        train_tokenizer(lines, "bpe", vocabulary)


def test_an_unknown_kind_is_refused(lines):
    with pytest.raises(InputError, match=r"^Unknown tokenizer 'words'\. Known: unigram, bpe\.$"):
        train_tokenizer(lines, "words", 40)


def test_damaged_models_are_refused(lines):
    for model in (b"garbage", b"", train_tokenizer(lines, "bpe", 41)):
        with pytest.raises(InputError, match=r"^The stored tokenizer is damaged: "):
            encode(model, 40, lines)


def test_without_the_package_the_message_is_the_command_that_brings_it(lines, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InputError, match=r"pip install sentencepiece$"):
        train_tokenizer(lines, "bpe", 40)
