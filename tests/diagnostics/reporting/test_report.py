"""The report folder: page, figures, tables, summary."""

import csv
import html
import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import PERCENTILES, percentile_rows, percentiles
from semdiag.questions import registry
from semdiag.questions.heads import head_cells, head_table
from semdiag.reporting.report import write_report
from semdiag_files import InputError, from_csv_cell, visible

pytestmark = pytest.mark.usefixtures("few_resamples")

STEERING = "\x1b]0;title\x07\x1b[31m\x9b2J\u202e\u2066\u200f"
FORMULAS = ("=HYPERLINK(1)", "+1+1", "-x", "@SUM(A1)", "\t=1", " =1", "\uff1d1", "'=1")
HOSTILE = "<script>alert(1)</script>\"'&.pt"
VOID = {"meta", "img", "br", "source", "link"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; refuses tags that are not closed in order."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(Path(path).read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if not self.open or self.open[-1] != "style" else ""

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def hostile(model):
    full, topk = model("full", HOSTILE, path="a/" + HOSTILE), model("topk", HOSTILE)
    bad = pd.DataFrame({"model": ["a/" + HOSTILE], "sample": [0], "layer": [1], "head": [0], "scores": [17]})
    return Measurements.concat([full.replace(non_finite=bad), topk])


@pytest.fixture(scope="module")
def kept(make_four, tmp_path_factory):
    """The report on one model of each attention, queries kept. Do not write to its folder."""
    page, _ = write_report(Findings(make_four()), tmp_path_factory.mktemp("kept"), "x", ["svg"], keep_queries=True)
    return page.parent


@pytest.mark.slow
def test_pictures_are_described_by_what_they_show(full_report):
    """Their legend and the titles of their panels, and no model that is in others alone."""
    images = {Path(image["src"]).stem: image["alt"] for image in Page(full_report / "index.html").all("img")}
    assert "top-k (k = 3)" in images["dispersion_by_layer"]
    assert "banded" in images["dispersion_by_layer"]
    assert re.search(r"weight kept by the 3 largest scores: .* heads\.$", images["heads_map"])
    assert not any("{" in alt for alt in images.values())


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing_from_outside(full_report):
    folder, page = full_report, Page(full_report / "index.html")
    images = page.all("img")
    assert {Path(image["src"]).stem for image in images} == set(registry.figures()) - {"cost"}
    assert len(images) == len(registry.figures()) - 1
    assert len(page.all("svg")) == 2  # the cost, for screens and telephones
    for image in images:
        assert (folder / image["src"]).is_file()
        assert len(image["alt"]) > 60
        assert int(image["width"]) > 300
        assert int(image["height"]) > 200
    check_addresses(page, folder)


def check_addresses(page, folder):
    """Every address of the page is a file beside it or a place in it."""
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object")
        assert tag != "script" or not attributes
        for name in ("src", "href", "srcset"):
            address = attributes.get(name, "")
            assert "://" not in address
            if address.startswith("#"):
                assert address[1:] in {a.get("id") for _, a in page.tags}
            elif address:
                assert (folder / address).is_file()
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert not {"http:", "https:", "url(", "@import", "onload"} & set(text.split())
    assert "http" not in text.replace("http://www.w3.org/", "")  # names of SVG, which nothing fetches
    assert "@media print" in text


@pytest.mark.slow
def test_a_sentence_stands_once_and_headings_are_answers(kept):
    text = html.unescape((kept / "index.html").read_text(encoding="utf-8"))
    summary = json.loads((kept / "summary.json").read_text(encoding="utf-8"))
    (first,) = re.findall("<h1>(.*)</h1>", text)
    assert first == summary["verdict"][0]
    said = Page(kept / "index.html").text  # without the texts for those who do not see the pictures
    for sentence in summary["verdict"]:
        assert said.count(sentence) <= 1
    shown = [glance for glance in summary["glances"].values() if glance["words"] != "measured"]
    assert len(shown) >= 3
    for glance in shown:
        assert re.search(r"\d", glance["number"])
        assert re.search(rf"<h2>.*{re.escape(glance['number'])}", text) or glance["number"] in first
    (title,) = re.findall("<title>(.*)</title>", text)
    assert len(title) < 80


@pytest.mark.slow
def test_of_an_external_model_the_papers_theory_is_folded(model, theory, probed, tmp_path):
    measured = probed(theory(model("full", path="own:build", within=(3,))))
    findings = Findings(measured.replace(models=measured.models.assign(source="factory")))
    page, _ = write_report(findings, tmp_path / "r", "x", formats=())
    text = page.read_text(encoding="utf-8")
    screens, _, folded = text.partition('<details id="theory">')
    assert 'id="stability"' in folded.partition('<details id="details">')[0]
    assert 'id="mask-stability"' in screens
    assert "paper" not in screens.partition("<main")[2].partition("<details")[0]
    assert '<div class="heads"' in screens
    sections = re.findall(r'<a href="#([\w-]+)">', text.partition("<nav")[2].partition("</nav>")[0])
    places = [text.index(f'id="{section}"') for section in sections]
    assert {"theory", "details"} < {*sections}
    assert places == sorted(places)


@pytest.mark.slow
def test_a_cell_of_the_map_opens_its_head_and_says_its_values(model, tmp_path):
    findings = Findings(model("full", path="own:build"))
    page, _ = write_report(findings, tmp_path / "r", "x", formats=(), look="<p>a page of one text</p>")
    cells = [a for a in Page(page).all("a") if "title" in a and a["href"].startswith("look.html#")]
    table = findings(head_table)
    quantity = findings(head_cells).quantity
    assert [a["href"] for a in cells] == [f"look.html#{r.layer}.{r.head}.{quantity}" for r in table.itertuples()]
    for cell, row in zip(cells, table.itertuples(), strict=True):
        assert f"layer {row.layer}, head {row.head}: " in cell["title"].lower()
        assert f"dispersion δ {row.dispersion:.3g} nats" in cell["title"]
    alone, _ = write_report(findings, tmp_path / "without", "x", formats=())
    assert not any("look.html" in a.get("href", "") for a in Page(alone).all("a"))


@pytest.mark.slow
def test_every_figure_has_one_for_telephones_and_the_page_no_address_outside(kept):
    page = Page(kept / "index.html")
    narrow = [source["srcset"] for source in page.all("source") if "media" in source]
    assert len(narrow) == len(page.all("img")) > 3
    assert all((kept / file).is_file() for file in narrow)


@pytest.mark.slow
def test_the_verdict_is_in_words_and_numbers(kept):
    page = Page(kept / "index.html")
    assert "the top-k model has the smaller dispersion at the 50th, 75th, 90th and 95th percentile" in page.text
    assert "ratio 0.25, 95% interval 0.25 to 0.25" in page.text
    assert "even-pairs, banded-3, seed 7 0.5 times" in page.text
    assert "full after 4 epochs, top-k (k = 3) after 2 epochs" in page.text
    assert "all have more than 0. The busiest key is kept by 6 queries." in page.text
    assert "yes" in page.text


@pytest.mark.slow
def test_a_failing_pair_and_a_lone_model_are_said(model, tmp_path):
    pair = Measurements.concat([model("full"), model("topk")])
    queries = pair.queries.copy()
    queries.loc[queries["model"].str.contains("topk"), "dispersion"] *= 100
    worse = pair.replace(queries=queries)
    page = Page(write_report(Findings(worse), tmp_path / "worse", "x", formats=())[0])
    assert "δₕ is not below δₛ at p50" in page.text
    assert "no at p50, p75, p90, p95" in page.text
    alone = Page(
        write_report(Findings(model("topk")), tmp_path / "alone", "x", ["svg"], sections=["dispersion"])[0]
    )
    assert re.search(r"the scores of a query span .* percentile, over the keys that it keeps\.", alone.text)
    assert "Nothing is compared" not in alone.text


@pytest.mark.slow
def test_initialisation_is_not_mixed_with_the_trained_models(many, tmp_path):
    write_report(Findings(many), tmp_path / "r", "x", formats=())
    summary = json.loads((tmp_path / "r" / "summary.json").read_text(encoding="utf-8"))
    assert [pair["snapshot"] for pair in summary["pairs"]] == ["last"] * 4 + ["initialisation"] * 4
    assert all(("initialisation" in p["full"]) == ("initialisation" in p["topk"]) for p in summary["pairs"])
    assert summary["verdict"][5].startswith("At initialisation: ")
    assert "; before training it is " in summary["verdict"][0]


@pytest.mark.slow
def test_strings_from_files_are_escaped(hostile, tmp_path):
    parts = {"a": {"formats": ()}, "b": {"formats": ["svg"], "sections": ["separation", "learning"]}}
    for name, part in parts.items():
        path, _ = write_report(Findings(hostile), tmp_path / name, "semdiag report " + HOSTILE, **part)
        assert path.read_text(encoding="utf-8").count("<script") == 1  # the one of the template
        page = Page(path)
        assert page.all("script") == [{}]
    assert page.all("img")
    assert "semdiag report " + HOSTILE in page.text
    assert f"a/{HOSTILE}: layer 1, head 0, sample 0: 17 scores" in page.text
    assert f"Diverged: 17 attention scores of a/{HOSTILE} are NaN or infinite" in page.text


@pytest.mark.slow
def test_no_text_of_a_file_steers_a_browser_a_terminal_or_a_spreadsheet(model, tmp_path):
    """Whatever stands in names: what people open shows it, and JSON holds it as it is."""
    names = [f"{formula}/{STEERING}.pt" for formula in FORMULAS]
    kinds = ["full", "topk", "banded", "block"] * 2
    found = [model(kind, path=name, seed=i) for i, (kind, name) in enumerate(zip(kinds, names, strict=True))]
    bad = pd.DataFrame({"model": names[:1], "sample": [0], "layer": [1], "head": [0], "scores": [17]})
    found[0] = found[0].replace(non_finite=bad)
    sections = ["dispersion", "separation", "learning"]
    drawn = write_report(Findings(Measurements.concat(found[:2])), tmp_path / "d", "x", ["svg"], sections=sections)
    findings = Findings(Measurements.concat(found))
    folder = write_report(findings, tmp_path / "r", names[0], (), sections=sections)[0].parent
    tables, figures = sorted(folder.glob("data/*.csv")), sorted(drawn[0].parent.glob("figures/*.svg"))
    pages = [folder / "index.html", *figures, *tables]
    for file in pages:
        assert not set(STEERING) - set("]0;title[31m2J") & set(file.read_text(encoding="utf-8")), file.name
    assert len(pages) - len(tables) > 3
    for figure in figures:
        ElementTree.parse(figure)  # with control characters it would be no XML
    read = [csv.reader(StringIO(file.read_bytes().decode(), newline="")) for file in tables]
    cells = [cell for table in read for row in table for cell in row]
    numbers = pd.to_numeric(pd.Series(cells), errors="coerce").notna()
    for cell, is_number in zip(cells, numbers, strict=True):
        assert is_number or not re.match(r"[\s']*[=+\-@\uff1d]|[\t\r\n]", cell) or cell.startswith("'"), cell
    said = {row["model"] for row in json.loads((folder / "summary.json").read_text(encoding="utf-8"))["results"]}
    assert said == set(names)
    models = {from_csv_cell(cell) for cell in cells if ".pt" in cell}
    assert models == {visible(name) for name in names}


@pytest.mark.slow
def test_layers_that_were_not_captured_are_said_at_the_top(four, tmp_path):
    models = four.models.assign(attention_captured=1)
    page = Page(write_report(Findings(four.replace(models=models)), tmp_path / "r", "x", formats=())[0])
    assert "not every attention layer was captured" in page.text
    assert "2 / 1" in page.text


@pytest.mark.slow
def test_the_summary_is_valid_json(four, tmp_path):
    queries = four.queries.copy()
    queries.loc[queries["model"].str.contains("block"), "dispersion"] = float("nan")
    models = four.models.assign(accuracy=float("nan"), residual=float("nan"))
    broken = four.replace(queries=queries, models=models)
    write_report(Findings(broken), tmp_path / "r", "the command", formats=["svg"], sections=["separation"])
    text = (tmp_path / "r" / "summary.json").read_text(encoding="utf-8")
    summary = json.loads(text, parse_constant=pytest.fail)
    assert (summary["schema"], summary["command"]) == ("semdiag.report/2", "the command")
    block = summary["results"][3]
    assert block["accuracy"] is None
    assert block["dispersion"]["all"]["p50"] is None
    assert (block["dispersion"]["all"]["undefined"], block["epochs_to_95"]) == (96, 2)
    assert summary["pairs"][0]["passed"] is True
    assert summary["figures"]["key_load"] == ["figures/key_load.svg"]


@pytest.mark.slow
@pytest.mark.parametrize("quantity", ["dispersion", "separation", "load"])
def test_csv_holds_the_percentiles(quantity, four, kept):
    table = pd.read_csv(kept / "data" / f"{quantity}.csv")
    columns = [*percentiles([1.0])]
    assert list(table)[-len(columns) :] == columns
    assert [f"p{p}" for p in PERCENTILES] == columns[2:-2]
    own = four.of("even-pairs-topk-7/last.pt")
    rows = own.loads if quantity == "load" else own.queries
    found = table[table["model"] == "even-pairs-topk-7/last.pt"]
    assert found[found["layer"] == "all"][columns].iloc[0].to_dict() == pytest.approx(percentiles(rows[quantity]))
    layers = found[found["layer"] != "all"][columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        layers, percentile_rows(rows, quantity, "layer", "head")[columns], check_dtype=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{"formats": ()}, {"formats": ["svg"], "sections": ["separation"]}])
def test_kept_queries_redraw_the_same_report(parts, kept, four, tmp_path):
    for name, measurements in (("a", four), ("b", Measurements.load(kept / "data"))):
        write_report(Findings(measurements), tmp_path / name, "x", keep_queries=True, **parts)
    files = [file.relative_to(tmp_path / "a") for file in tmp_path.glob("a/**/*.*") if file.is_file()]
    assert {"index.html", "summary.json", "separation.csv"} <= {file.name for file in files}
    assert not parts["formats"] or any(file.suffix == ".svg" for file in files)
    for file in files:
        if file.suffix != ".parquet":
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@pytest.mark.slow
def test_kept_queries_are_not_lost_by_a_report_without(model, tmp_path):
    one = model("topk")
    write_report(Findings(one), tmp_path / "a", "x", formats=(), keep_queries=True)
    with pytest.raises(InputError, match="would be lost"):
        write_report(Findings(one), tmp_path / "a", "x", formats=())
    assert Measurements.load(tmp_path / "a" / "data").models["model"].tolist() == one.models["model"].tolist()
    write_report(Findings(one), tmp_path / "a", "x", formats=(), keep_queries=True)


def test_queries_are_kept_on_request_only(model, tmp_path):
    write_report(Findings(model("topk")), tmp_path / "r", "x", formats=())
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.slow
def test_sections_are_chosen(four, tmp_path):
    page = Page(write_report(Findings(four), tmp_path / "s", "x", formats=["svg"], sections=["separation"])[0])
    assert {Path(image["src"]).stem for image in page.all("img")} == {"separation_by_layer", "key_load"}
    assert {path.name for path in (tmp_path / "s/data").iterdir()} == {
        "dispersion.csv", "separation.csv", "load.csv", "within.csv",
    }  # fmt: skip
    with pytest.raises(ValueError, match="dispersion, heads, separation, learning"):
        write_report(Findings(four), tmp_path / "x", "x", sections=["weather"])


@pytest.mark.slow
@pytest.mark.parametrize("formats", [(), ("pdf",), ("png", "svg")])
def test_formats(formats, four, tmp_path):
    page = Page(write_report(Findings(four), tmp_path / "r", "x", formats=formats, sections=["learning"])[0])
    found = {path.suffix[1:] for path in tmp_path.rglob("training_curves.*")}
    assert found == set(formats)
    assert len(page.all("img")) == bool({"png", "svg"} & set(formats))
    narrow = bool({"png", "svg"} & set(formats))  # for telephones
    assert len(page.all("source")) == ({"png", "svg"} <= set(formats)) + narrow
    check_addresses(page, tmp_path / "r")
    assert {a["href"] for a in page.all("a")} >= {f"figures/training_curves.{name}" for name in formats}


@pytest.mark.parametrize("within", [(), (3,)])
def test_how_far_the_scores_of_an_external_model_span_is_said_once(within, model, tmp_path):
    measured = model("full", path="own:build", within=within)
    external = measured.replace(models=measured.models.assign(source="factory"))
    write_report(Findings(external), tmp_path / "r", "x", formats=())
    said = json.loads((tmp_path / "r" / "summary.json").read_text(encoding="utf-8"))["verdict"]
    assert said[0].startswith("own:build: the scores of a query span ")
    assert sum("span" in sentence for sentence in said) == 1
