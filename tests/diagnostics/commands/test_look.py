"""``semdiag look``: which input, where the page goes, and what is refused before anything runs."""

import json
import re
import warnings

import pandas as pd
import pytest
import torch

import semdiag

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """A folder with a small model of texts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
        folder = tmp_path_factory.mktemp("model")
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.BertConfig(vocab_size=len(WORDS), **sizes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformers.BertModel(config).eval().save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
        transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def labels(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])["labels"]


@pytest.mark.filterwarnings("ignore")
def test_a_text_is_cut_into_the_models_tokens(run_semdiag, here, text_model):
    done = run_semdiag("look", f"hf:{text_model}", "--text", "a b\ntau c", "--k", 2)
    assert done.code == 0, done.err
    (page,) = (here / "reports").iterdir()
    assert page.name == f"look-hf-{text_model.name}.html"
    assert labels(page) == [["[CLS]", "a", "b", "[UNK]", "c", "[SEP]"]]
    assert '"k":2' in page.read_text(encoding="utf-8")
    first, second, third = done.out.splitlines()
    assert re.fullmatch(r"Head \d of layer \d spans the widest range of scores: median δ .* has [\d.]+\.", first)
    assert second == f"hf:{text_model}: 6 tokens, 4 heads in 2 layers"
    assert third == f"Page: {page.relative_to(here)}"
    again = run_semdiag("look", f"hf:{text_model}", "--text", "d", "--quiet")
    assert (again.code, again.out, again.err) == (0, "", "")
    assert labels(page) == [["[CLS]", "d", "[SEP]"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["txt", "jsonl", "npy"])
def test_of_a_file_the_first_sample_is_taken(kind, run_semdiag, here, text_model):
    content = {"txt": "a b c\nd\n", "jsonl": '{"text": "a b c"}\n{"text": "d"}\n'}
    file = here / f"inputs.{kind}"
    if kind == "npy":
        import numpy as np

        np.save(file, np.array([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]]))
    else:
        file.write_text(content[kind], encoding="utf-8")
    done = run_semdiag("look", f"hf:{text_model}", "--inputs", file, "--out", "page.html")
    assert done.code == 0, done.err
    assert labels(here / "page.html") == [["[CLS]", "a", "b", "c", "[SEP]"]]


@pytest.mark.filterwarnings("ignore")
def test_a_cut_text_is_said_to_be_cut(run_semdiag, here, text_model):
    done = run_semdiag("look", f"hf:{text_model}", "--text", "a b c d e f", "--max-length", 5)
    assert f"\nhf:{text_model}: 5 tokens" in done.out
    assert "semdiag: The input is longer: its first 5 tokens are shown (--max-length 5)" in done.err


def test_without_inputs_a_run_shows_its_first_held_out_sample(run_semdiag, here, tiny_runs):
    done = run_semdiag("look", tiny_runs.full, "--out", "page.html")
    assert done.code == 0, done.err
    tokens = semdiag.load(tiny_runs.full).default_inputs(1, 0)[0]
    assert labels(here / "page.html") == [[str(int(token)) for token in tokens[0]]]
    assert '"bytes":8' in (here / "page.html").read_text(encoding="utf-8")  # the same on every processor


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "a", "--inputs", "x.txt"], r"^--text and --inputs are two inputs: name one of them\.$"),
        (["--text", "a"], r"^--text: texts need a tokenizer, and .* has none\."),
        (["--k", "13"], r"^k must lie in 1 … 12, the largest number of keys\. Got k=13\.$"),
        (["--k", "0"], r"^k must lie in 1 … 12"),
        (["--out", "page.pdf"], r"^--out takes the name of an \.html file\. Got page\.pdf\.$"),
        (["--out", "mine.html"], r"^mine\.html is not a page of semdiag look and is not replaced\."),
        (["--max-length", "300"], r"^A page shows at most 256 tokens\. Got --max-length 300\.$"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(words, said, refusal, here, tiny_runs):
    (here / "mine.html").write_text("<p>mine", encoding="utf-8")
    assert re.search(said, refusal("look", tiny_runs.full, *words))
    assert [path.name for path in here.iterdir()] == ["mine.html"]


def test_k_is_refused_for_a_model_that_selects_its_keys(refusal, here, tiny_runs):
    assert "has a mask of its own" in refusal("look", tiny_runs.topk, "--k", 2)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_texts_without_one_asks_for_it(refusal, here, text_model):
    said = refusal("look", f"hf:{text_model}")
    assert said.startswith(f"Name a text for hf:{text_model} with --text TEXT; or with --inputs FILE token ids")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_report_on_texts_links_its_outlying_heads_to_the_page_of_the_first(run_semdiag, here, text_model):
    (here / "texts.txt").write_text("a b c d e f g\nc d e\n", encoding="utf-8")
    asked = ("report", f"hf:{text_model}", "--inputs", "texts.txt", "--rerun-minutes", 0, "--figures", "none")
    done = run_semdiag(*asked, "--keep-queries", "--out", "r", "--quiet")
    assert done.code == 0, done.err
    assert labels(here / "r" / "look.html") == [["[CLS]", *"abcdefg", "[SEP]"]]
    table = pd.read_csv(here / "r" / "data" / "heads.csv")
    widest = table.loc[table["dispersion"].idxmax()]
    address = f"look.html#{widest['layer']}.{widest['head']}"
    name = f"head {widest['head']} of layer {widest['layer']}"
    link = f'<a href="{address}">{name}</a>: scores furthest apart (median δ {widest["dispersion"]:.3g} nats)'
    assert link in (here / "r" / "index.html").read_text(encoding="utf-8")
    again = run_semdiag("report", "--from", "r", "--figures", "none", "--out", "again", "--quiet")
    assert again.code == 0, again.err
    kept, drawn = ((here / folder / "look.html").read_bytes() for folder in ("r", "again"))
    assert kept == drawn
    assert address in (here / "again" / "index.html").read_text(encoding="utf-8")


def test_of_a_folder_of_runs_one_must_be_named(refusal, here, tiny_runs):
    assert re.search(
        r"runs\d* holds 2 checkpoints: name one, like .*last\.pt\.", refusal("look", tiny_runs.folder)
    )
