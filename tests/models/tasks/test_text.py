"""Windows of a text, what the trainer makes of them, and the numbers it reports."""

import base64
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag_files import InputError
from semdiag_models.checkpoint import read_checkpoint, write_checkpoint
from semdiag_models.config import ModelConfig, TextSource, TrainingConfig
from semdiag_models.model import Encoder
from semdiag_models.run_folder import open_run, run_name, train_run
from semdiag_models.tasks import draw_data, find_task, task_of
from semdiag_models.text import Pieces, Text, open_text, perplexity, read_lines, unigram_perplexity, windows
from semdiag_models.train import Trainer

sentencepiece = pytest.importorskip("sentencepiece")
CPU = torch.device("cpu")
PIECES = 100


@pytest.fixture(scope="module")
def source(story):
    return open_text(story, None, "bpe", PIECES)


@pytest.fixture
def configs(source):
    """Call with what differs: a tiny model, and its training on the story."""

    def make(model=None, **training):
        recipe = Text(source).recipe
        small = {"blocks": 1, "width": 16, "mlp_width": 16, "head_width": 16, "attention": "topk", "k": 3}
        sizes = {"vocabulary_size": PIECES + 1, "classes": PIECES, "length": recipe.length}
        data = {"train_samples": recipe.train_samples, "holdout_samples": recipe.holdout_samples}
        run = {"epochs": 2, "seed": 5, "batch_size": 25, "learning_rate": 1.0, "text": source, **data}
        return (
            ModelConfig(**{**sizes, **small, **(model or {})}),
            TrainingConfig("text", recipe.length, **{**run, **training}),
        )

    return make


def naive_windows(lines, length):
    return [
        (line[start : start + length], line[start + length])
        for line in lines
        for start in range(len(line))
        if start + length < len(line)
    ]


def flat(lines):
    return Pieces(
        torch.tensor([i for line in lines for i in line], dtype=torch.int32),
        torch.tensor([len(line) for line in lines]),
    )


def test_the_windows_of_five_pieces():
    """The example of the specification: a b c d e with C = 3 gives (a b c → d), (b c d → e)."""
    tokens, labels = windows(flat([[10, 11, 12, 13, 14]]), 3, torch.arange(2))
    assert tokens.tolist() == [[10, 11, 12], [11, 12, 13]]
    assert labels.tolist() == [13, 14]
    assert tokens.dtype == labels.dtype == torch.int64


def test_no_window_crosses_a_line_and_short_lines_have_none():
    tokens, labels = windows(flat([[1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11, 12]]), 2, torch.arange(3))
    assert tokens.tolist() == [[3, 4], [9, 10], [10, 11]]
    assert labels.tolist() == [5, 11, 12]


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=9), st.integers(1, 6), st.randoms())
def test_windows_are_those_of_a_loop_in_any_order(lines, length, random):
    naive = naive_windows(lines, length)
    if not naive:
        return
    order = list(range(len(naive)))
    random.shuffle(order)
    tokens, labels = windows(flat(lines), length, torch.tensor(order))
    assert tokens.tolist() == [naive[i][0] for i in order]
    assert labels.tolist() == [naive[i][1] for i in order]


def test_recipe_and_data_are_those_of_a_loop_over_the_file(source, story):
    processor = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(source.model))
    lines = [processor.encode(line) for line in story.read_text(encoding="utf-8").splitlines()]
    train, holdout = lines[:270], lines[270:]
    length = sum(map(len, train)) // len(train)
    naive = naive_windows(train, length), naive_windows(holdout, length)
    recipe = Text(source).recipe
    assert (recipe.length, recipe.train_samples, recipe.holdout_samples) == (length, *map(len, naive))
    drawn = Text(source).draw(len(naive[0]), len(naive[1]), length, torch.Generator().manual_seed(3))
    for (tokens, labels), expected in zip(drawn, naive, strict=True):
        assert sorted(zip(tokens.tolist(), labels.tolist(), strict=True)) == sorted(expected)


def test_the_recipe_is_the_papers_small_model(source):
    recipe = Text(source).recipe
    assert (recipe.blocks, recipe.width, recipe.mlp_width, recipe.head_width) == (8, 32, 128, 32)
    assert (recipe.batch_size, recipe.epochs, recipe.learning_rate, recipe.learning_rate_decay) == (
        128,
        50,
        1,
        0.99,
    )


@pytest.mark.parametrize(("blocks", "parameters"), [(8, 366_848), (16, 467_456), (32, 668_672), (64, 1_071_104)])
def test_the_model_is_the_papers_but_for_the_embedding_of_pad(source, blocks, parameters):
    text = Text(replace(source, vocabulary=4096))
    recipe = Text(source).recipe
    config = ModelConfig(
        text.vocabulary_size, text.classes, 31, blocks=blocks, width=recipe.width, mlp_width=recipe.mlp_width,
        head_width=recipe.head_width,
    )  # fmt: skip
    with torch.device("meta"):
        assert sum(p.numel() for p in Encoder(config).parameters()) == parameters + recipe.width


def test_fewer_windows_are_a_random_part_of_all(source):
    recipe = Text(source).recipe
    some, rest = (
        Text(source).draw(n, 5, recipe.length, torch.Generator().manual_seed(3))[0][0].tolist()
        for n in (20, recipe.train_samples)
    )
    assert some == rest[:20]
    other = Text(source).draw(20, 5, recipe.length, torch.Generator().manual_seed(4))[0][0].tolist()
    assert some != other


def test_a_second_file_is_held_out_whole_and_unseen_by_the_tokenizer(source, story, tmp_path):
    second = tmp_path / "second.txt"
    second.write_text(
        "the old snow\u2603 fox hides in the old wood in the rain in the old wood .\n", encoding="utf-8"
    )
    text = Text(open_text(story, second, "bpe", PIECES))
    assert text.source.holdout_file == str(second)
    assert text.recipe.train_samples > Text(source).recipe.train_samples  # of all 300 lines
    tokens, _ = text.draw(1, text.recipe.holdout_samples, 5, torch.Generator())[1]
    assert 0 in tokens  # the snowman


def test_windows_that_are_not_there_are_refused(source):
    text, generator = Text(source), torch.Generator()
    with pytest.raises(
        InputError, match=r"the held-out lines has \d+ windows of 5 pieces; 100000 were asked for\.$"
    ):
        text.draw(1, 100_000, 5, generator)
    with pytest.raises(InputError, match="has more than 500 pieces: no window"):
        text.draw(1, 1, 500, generator)
    with pytest.raises(InputError, match="has more than 500 pieces: no window"):
        _ = Text(source, window=500).recipe


def test_lines_of_equal_length_have_no_window_with_a_next_piece(tmp_path):
    """C is then the length of every line."""
    file = tmp_path / "short.txt"
    file.write_text("a\nb\nc\nd\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"No line of .*short\.txt has more than 2 pieces"):
        _ = Text(open_text(file, None, "bpe", 7)).recipe


def test_a_text_that_is_gone_or_has_changed_is_refused(story, tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(story.read_text(encoding="utf-8"), encoding="utf-8")
    text = Text(open_text(file, None, "bpe", 40))
    file.write_text("something else\nand more\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"mine\.txt has changed since the run \(SHA-256 .*--inputs FILE\.txt"):
        text.draw(1, 1, 3, torch.Generator())
    file.unlink()
    with pytest.raises(InputError, match=r"mine\.txt of this run is not here\. .*--inputs FILE\.txt\.$"):
        text.draw(1, 1, 3, torch.Generator())


def test_another_text_is_cut_by_the_same_tokenizer(source, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("the old fox swims home at dawn .\n", encoding="utf-8")
    processor = sentencepiece.SentencePieceProcessor(model_proto=base64.b64decode(source.model))
    naive = naive_windows([processor.encode(read_lines(other)[0][0])], 4)
    tokens, labels = Text(source).draw_from(other, 1000, 4, torch.Generator())
    assert sorted(zip(tokens.tolist(), labels.tolist(), strict=True)) == sorted(naive)
    assert len(Text(source).draw_from(other, 2, 4, torch.Generator())[0]) == 2


def test_a_text_and_nothing_else_has_a_text(source):
    with pytest.raises(InputError, match="The task text and nothing else has a text"):
        TrainingConfig("text", 5, 1)
    with pytest.raises(InputError, match="The task text and nothing else has a text"):
        TrainingConfig("even-pairs", 5, 1, text=source)
    with pytest.raises(InputError, match="semdiag train text --text FILE"):
        find_task("text")


def test_configurations_come_back_from_plain_values(configs, source):
    _, training = configs()
    assert TrainingConfig.from_dict(training.to_dict()) == training
    assert task_of(training).source == source
    for damage in ({"vocabulary": 0}, {"model": 5}, {"pages": 3}):
        with pytest.raises(InputError):
            TrainingConfig.from_dict({**training.to_dict(), "text": {**source.to_dict(), **damage}})
    with pytest.raises(InputError, match=r"text must be TextSource \| None\. Got 'story'\.$"):
        TrainingConfig.from_dict({**training.to_dict(), "text": "story"})


def test_the_label_tells_texts_tokenizers_and_vocabularies_apart(source, configs):
    plain = TextSource("dir/War & Peace.txt", "0" * 64, "bpe", 40, "AA==")
    assert plain.label.startswith("War-Peace-")
    others = [
        replace(plain, sha256="1" * 64),
        replace(plain, model="AB=="),
        replace(plain, holdout_sha256="2" * 64),
    ]
    assert len({text.label for text in [plain, *others]}) == 4
    model, training = configs()
    assert run_name(model, training) == f"text-{source.label}-topk-3-seed-5"


def test_a_tokenizer_that_is_not_base64_is_refused(source):
    with pytest.raises(InputError, match="The stored tokenizer is damaged: it is not base64"):
        Text(replace(source, model="?")).draw(1, 1, 5, torch.Generator())


def test_padding_to_whole_blocks_uses_the_id_after_the_pieces(configs):
    model, training = configs({"attention": "block", "k": 7, "length": 21, "pad_as_token": True}, epochs=1)
    train, _ = draw_data(training, model.length, model.pad_id)
    assert (train.tokens[:, training.length :] == PIECES).all()
    assert (train.tokens[:, : training.length] < PIECES).all()
    assert train.labels.max() < PIECES


@pytest.mark.slow
def test_training_learns_the_context_far_below_the_entropy_of_single_pieces(configs):
    model, training = configs(epochs=6)
    trainer = Trainer(model, training, CPU)
    trainer.run(lambda progress: None)
    shares = torch.bincount(trainer.holdout_split.labels).double()
    shares = shares[shares > 0] / shares.sum()
    entropy = -float((shares * shares.log()).sum())  # what no rule that ignores the window can beat
    assert trainer.history["holdout_loss"][-1] < 0.6 * entropy
    assert trainer.history["holdout_loss"][-1] < trainer.history["holdout_loss"][0]


def test_loss_accuracy_and_perplexity_are_those_of_a_loop(configs):
    model, training = configs()
    trainer = Trainer(model, training, CPU)
    loss, accuracy = trainer.evaluate(trainer.holdout_split)
    encoder = trainer.encoder.double().eval()
    encoder.positions = encoder.positions.double()
    product, right, n = 1.0, 0, len(trainer.holdout_split.labels)
    for tokens, label in zip(*trainer.holdout_split, strict=True):
        with torch.no_grad():
            weights = encoder(tokens[None])[0].exp()
        product *= float(weights[label] / weights.sum()) ** (-1 / n)  # geometric mean of 1 / p
        right += int(weights.argmax()) == int(label)
    assert perplexity(loss) == pytest.approx(product, rel=1e-5)
    assert accuracy == pytest.approx(right / n)


def test_perplexities_at_the_ends():
    assert perplexity(0.0) == 1
    assert perplexity(1e6) == math.inf


def test_the_baseline_by_hand():
    """Counts 3, 1, 0 plus one each: shares 4/7, 2/7, 1/7."""
    found = unigram_perplexity(torch.tensor([0, 0, 1, 0]), torch.tensor([0, 2]), 3)
    assert found == pytest.approx(math.sqrt(7 / 4 * 7))


@pytest.mark.slow
def test_resumed_and_uninterrupted_runs_end_with_the_same_weights(configs, tmp_path):
    for name, stops in (("whole", [3]), ("parts", [1, 2, 3])):
        for epochs in stops:
            trainer = open_run(
                tmp_path / name,
                *configs(epochs=epochs, exact=True),
                CPU,
                resume=epochs > stops[0],
                overwrite=False,
            )
            train_run(tmp_path / name, trainer, {})
    one, two = (read_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    assert all(torch.equal(one.state[key], two.state[key]) for key in one.state)
    assert one.training == two.training
    assert [one.history[key] for key in one.history if key != "seconds"] == [
        two.history[key] for key in two.history if key != "seconds"
    ]


def test_a_run_on_another_text_is_not_resumed(configs, source, story, tmp_path):
    trainer = open_run(tmp_path / "run", *configs(), CPU, resume=False, overwrite=False)
    train_run(tmp_path / "run", trainer, {})
    other = open_text(story, None, "unigram", 40)
    with pytest.raises(
        InputError, match=r"was trained with tokenizer=bpe, not unigram\. Use the run's own options"
    ):
        open_run(tmp_path / "run", *configs(text=other), CPU, resume=True, overwrite=False)
    retrained = replace(source, model=other.model)
    with pytest.raises(InputError, match=r"was trained with model=[0-9a-f]{8}, not [0-9a-f]{8}\."):
        open_run(tmp_path / "run", *configs(text=retrained), CPU, resume=True, overwrite=False)


def test_a_checkpoint_keeps_the_tokenizer_to_the_byte(configs, source, tmp_path):
    trainer = open_run(tmp_path / "run", *configs(epochs=1), CPU, resume=False, overwrite=False)
    train_run(tmp_path / "run", trainer, {})
    saved = read_checkpoint(tmp_path / "run" / "last.pt")
    assert saved.training.text == source
    write_checkpoint(tmp_path / "again.pt", saved)
    assert read_checkpoint(tmp_path / "again.pt").training == saved.training
