"""Every figure: what it shows, and what it does with little, much and broken data."""

import contextlib
import functools
import re

import matplotlib
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings, find_pairs
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.percentiles import percentiles
from semdiag.presenting.drawing.panels import NothingToDrawError, heat_map, panels_of
from semdiag.presenting.drawing.style import (
    ATTENTION_STYLES,
    PAPER,
    attention_style,
    panel_grid,
    save_figure,
    stacked,
)
from semdiag.questions import heads, registry
from semdiag.questions.dispersion.answer import layer_ratios
from semdiag_files import InputError

pytestmark = pytest.mark.usefixtures("few_resamples")

THEORY = ("stability_curves",)
MASK_PROBES = ("masks_unchanged",)
PROBES = "lipschitz_percentiles", "landscape_contour"
BY_HAND = {"secants", "constants", "parameters", "masks", "noise_effects", "sweep", "loss_gradients", "landscape"}
RERUNS = ("cost",)
ELSEWHERE = tuple(  # drawn from what is not made up here: tested beside the runs or the probe they are about
    drawing.name
    for question in registry.reported().values()
    for heading in question.headings
    for drawing in heading.figures
    if not {*question.needs} <= BY_HAND
)


def shown(figure):
    return [ax for ax in figure.axes if ax.get_visible() and ax.get_label() != "<colorbar>"]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def words(figure):
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def title(ax):
    return ax.get_title(loc="left")


def boxes(ax):
    return [(p.get_x() + p.get_width() / 2, p.get_y(), p.get_height()) for p in ax.patches]


@pytest.fixture(scope="module")
def some(many):
    """Two tasks, last and initialisation, and a pair of models of unknown task."""
    seeds = many.models["seed"]
    return Measurements.concat([many.of(model) for model in many.models["model"][seeds.isna() | (seeds == 1)]])


@pytest.fixture(scope="module")
def several(some, make_four, theory, probed, reruns, probes):
    """Call with the name of a figure: findings on many models of which it can be drawn."""
    kinds = {
        THEORY: lambda: theory(some),
        MASK_PROBES: lambda: probed(some),
        RERUNS: lambda: reruns(probed(some)),
        PROBES: lambda: probes(make_four()),
    }
    made = functools.cache(lambda figures: Findings(kinds[figures]() if figures else some))
    return lambda name: made(next((figures for figures in kinds if name in figures), ()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in registry.figures() if name not in ELSEWHERE])
def test_many_models_are_drawn_without_touching_pyplot_or_its_settings(name, several):
    before = dict(matplotlib.rcParams)
    figure = registry.figures()[name](several(name))
    figure.draw_without_rendering()
    assert isinstance(figure, Figure)
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.pyplot.get_fignums() == []
    assert all(title(ax) for ax in shown(figure))


@pytest.fixture(scope="module")
def alone(model, theory, probes, probed):
    """Call with an attention: findings on a single model with every table of the probes."""
    return functools.cache(lambda attention: Findings(probed(probes(theory(model(attention))))))


@pytest.mark.parametrize("name", registry.figures())
@pytest.mark.parametrize("attention", ["full", "topk", "never heard of"])
def test_one_model_is_drawn_or_the_reason_is_said(name, attention, alone):
    try:
        figure = registry.figures()[name](alone(attention))
    except NothingToDrawError as error:
        reason = str(error)
        figure = None
    assert reason.endswith(".") if figure is None else shown(figure)


@pytest.fixture(scope="module")
def not_finite(model, theory, probes):
    """Call with a value: the same in all numbers of the queries of one model of three, and of all."""

    @functools.cache
    def make(value):
        three = Measurements.concat([model("full", within=(3,)), model("topk"), model("block")])
        three = probes(theory(three))
        three = three.replace(landscape=three.landscape[three.landscape["plane"] == 0])
        numbers = ["dispersion", "separation", "dispersion_k3", "separation_k3", "weight_kept_k3"]
        one = three.queries["model"].str.contains("block")
        some, every = three.queries.copy(), three.queries.copy()
        some.loc[one, numbers], every[numbers] = value, value
        return Findings(three.replace(queries=some)), Findings(three.replace(queries=every))

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in registry.figures() if name not in (*MASK_PROBES, *RERUNS, *ELSEWHERE)]
)
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_values_that_are_not_finite_do_not_stop_a_figure(name, value, not_finite):
    some, every = not_finite(value)
    registry.figures()[name](some).draw_without_rendering()
    if name in (*THEORY, *PROBES):
        return  # not drawn from queries
    if name in ("key_load", "training_curves"):
        registry.figures()[name](every)
    else:
        with pytest.raises(NothingToDrawError):
            registry.figures()[name](every)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.figures())
def test_no_models_at_all(name, four):
    tables = {t: getattr(four, t).iloc[:0] for t in ("models", "queries", "loads", "history", "non_finite")}
    with pytest.raises(NothingToDrawError):
        registry.figures()[name](Findings(Measurements(**tables)))


@pytest.mark.slow
def test_dispersion_by_layer_shows_percentiles_of_every_layer(four):
    (ax,) = shown(registry.figures()["dispersion_by_layer"](Findings(four)))
    assert (ax.get_ylabel(), ax.get_xlabel(), ax.get_yscale()) == ("semantic dispersion δ (nats)", "layer", "log")
    assert ax.get_xticks().tolist() == [0, 1]
    full = four.queries[four.queries["model"].str.contains("full") & (four.queries["layer"] == 0)]["dispersion"]
    table = percentiles(full)
    assert any(y == pytest.approx(table["p25"]) and y + h == pytest.approx(table["p75"]) for _, y, h in boxes(ax))
    assert any(np.allclose(line.get_ydata(), table["p50"]) for line in ax.lines if len(line.get_ydata()) == 2)
    assert len(ax.patches) == 4 * 2 * 4  # boxes, layers, models
    assert legend(ax.figure) == ["full", "top-k (k = 3)", "banded (k = 3)", "local blocks (k = 3)"]


@pytest.mark.slow
def test_ecdf_marks_the_percentiles(four):
    (ax,) = shown(registry.figures()["dispersion_ecdf"](Findings(four)))
    assert (ax.get_xlabel(), ax.get_xscale()) == ("semantic dispersion δ (nats)", "log")
    assert legend(ax.figure)[:2] == ["δₛ, full", "δₕ, top-k (k = 3)"]
    table = percentiles(four.of("even-pairs-topk-7/last.pt").queries["dispersion"])
    marks = [line.get_xydata() for line in ax.lines if len(line.get_xdata()) == 4]
    expected = [[table[f"p{p}"], p / 100] for p in (50, 75, 90, 95)]
    assert any(np.allclose(found, expected) for found in marks)
    widths = {line.get_color(): line.get_linewidth() for line in ax.lines if len(line.get_xdata()) > 4}
    assert widths[ATTENTION_STYLES["full"].color] > widths[ATTENTION_STYLES["banded"].color]


@pytest.mark.slow
def test_ecdf_marks_the_median_before_training_where_it_is_known(four):
    table = pd.DataFrame({"model": ["even-pairs-topk-7/last.pt"], "samples": 6, "dispersion": 0.25})
    for measured, marks in ((four, []), (four.replace(initialisation=table), [[0.25, 0.5]])):
        figure = registry.figures()["dispersion_ecdf"](Findings(measured))
        hollow = [line for line in shown(figure)[0].lines if line.get_markerfacecolor() == "white"]
        assert [line.get_xydata()[0].tolist() for line in hollow] == marks
        assert ("hollow" in words(figure)) == bool(marks)


@pytest.mark.slow
def test_ratio_is_known_and_never_crosses_snapshots(four, many):
    ratios = layer_ratios(Findings(four), resamples=20)
    assert ratios.groupby("model", sort=False)["ratio"].unique().map(list).to_dict() == {
        "even-pairs-topk-7/last.pt": [0.25],
        "even-pairs-banded-7/last.pt": [0.5],
        "even-pairs-block-7/last.pt": [0.625],
    }
    across = layer_ratios(Findings(many), resamples=2)
    compared = zip(across["model"], across["full"], strict=True)
    assert all(("initialisation" in sparse) == ("initialisation" in full) for sparse, full in compared)


@pytest.mark.slow
def test_titles_say_what_these_data_show_and_other_data_other_things(four):
    """The shares of layers, and the ends of medians, follow the numbers: here those of top-k's layer 1."""
    topk = four.queries["model"].str.contains("topk") & (four.queries["layer"] == 1)
    other = four.queries.copy()
    other.loc[topk, ["dispersion", "separation", "weight_kept_k3"]] = 90.0, 0.5, np.nan
    other.loc[other["model"].str.contains("full") & (other["layer"] == 1), "weight_kept_k3"] = 0.5
    found = {}
    for measured in (four, four.replace(queries=other)):
        for name in ("dispersion_by_layer", "separation_by_layer", "heads_map"):
            figure = registry.figures()[name](Findings(measured))
            found.setdefault(name, []).append([" ".join(title(ax).split()) for ax in shown(figure)])
    rest = ", 2 of 2 with banded, 2 of 2 with local blocks"
    below = [f"{count} of 2 layers with top-k{rest}" for count in (2, 1)]
    assert found["dispersion_by_layer"] == [
        [f"even-pairs: median δ below full attention's in {count}"] for count in below
    ]
    assert found["separation_by_layer"] == [
        ["even-pairs: median Δ of 0.01 nats in layer 0 with top-k"],
        ["even-pairs: median Δ of 0.01 nats in layer 0 to 0.5 in layer 1 with top-k"],
    ]
    kept = "weight kept by the 3 largest scores: at least half in"
    assert found["heads_map"] == [
        ["dispersion δ: 0.56 to 4.5 nats, the most in layer 1", f"{kept} 0 of 2 heads"],
        ["dispersion δ: 0.56 to 90 nats, the most in layer 1", f"{kept} 1 of 2 heads"],
    ]


def test_a_model_alone_is_told_by_its_layers(model):
    figure = registry.figures()["dispersion_by_layer"](Findings(model("topk")))
    assert " ".join(title(shown(figure)[0]).split()) == (
        "even-pairs: median δ of 0.56 nats in layer 0 to 1.1 in layer 1"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dispersion_by_layer", "separation_by_layer", "heads_map"])
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_titles_fit_their_figures(name, narrow, model):
    runs = [(kind, seed) for seed in (153476998, 235510766) for kind in ("full", "topk", "block")]
    several = Measurements.concat([model(kind, "missing-duplicate", seed, within=(3,)) for kind, seed in runs])
    with stacked() if narrow else contextlib.nullcontext():
        figure = registry.figures()[name](Findings(several))
    figure.draw_without_rendering()
    for ax in shown(figure):
        box = ax._left_title.get_window_extent()
        others = [other.get_window_extent() for other in shown(figure) if other is not ax]
        assert box.x1 <= figure.bbox.x1, title(ax)
        assert not any(box.overlaps(other) for other in others), title(ax)


@pytest.mark.slow
def test_separation_says_what_is_not_positive_and_what_is_undefined(four):
    figure = registry.figures()["separation_by_layer"](Findings(four))
    (ax,) = shown(figure)
    assert "Δ ≤ 0 of queries: banded 100%, local blocks 100%" in " ".join(
        words(figure).split()
    )  # top-k has none, full is left out
    assert (ax.get_ylabel(), ax.get_yscale()) == ("semantic separation Δ (nats)", "log")
    assert "full" not in legend(figure)


@pytest.mark.slow
def test_key_load_shows_shares_and_the_largest_load(four):
    figure = registry.figures()["key_load"](Findings(four))
    (ax,) = shown(figure)
    assert (ax.get_xlabel(), ax.get_yscale()) == ("load: queries that keep the key (count)", "log")
    curves = [line.get_xydata().tolist() for line in ax.lines if line.get_drawstyle() == "steps-pre"]
    assert [[0, 1], [0, 1], [6, 0.5]] in curves
    assert any(line.get_xydata().tolist() == [[6, 0.5]] for line in ax.lines)
    assert "k = 3" in words(figure)
    loads = four.loads[four.loads["model"].str.contains("topk")]["load"]
    assert f"keys never kept: top-k {(loads == 0).mean():.0%}" in " ".join(words(figure).split())


def test_training_curves_mark_the_arrival_or_say_there_was_none(model):
    runs = Measurements.concat([model("full", epochs=3), model("topk", epochs=3)])
    figure = registry.figures()["training_curves"](Findings(runs))
    accuracy, holdout = shown(figure)
    assert title(accuracy) == "even-pairs: training accuracy"
    assert title(holdout) == "held-out accuracy"
    assert [text.get_text() for text in accuracy.texts] == ["2"]  # of top-k; full did not arrive
    assert any(line.get_xydata().tolist() == [[2, 0.95]] for line in accuracy.lines)


@pytest.mark.parametrize(
    ("epochs", "gap", "columns"),
    [(5, 0.0, ["training"]), (5, 0.1, ["training", "held-out"]), (3, 0.0, ["training", "training loss (nats)"])],
)
def test_a_column_that_says_nothing_new_is_not_drawn(epochs, gap, columns, model):
    """Full attention arrives after 4 epochs here."""
    run = model("full", epochs=epochs)
    run.history["holdout_accuracy"] = run.history["train_accuracy"] - gap
    drawn = [title(ax) for ax in shown(registry.figures()["training_curves"](Findings(run)))]
    assert [name.removeprefix("even-pairs: ").removesuffix(" accuracy") for name in drawn] == columns


def test_losses_that_span_decades_are_drawn_on_a_logarithmic_axis(model):
    for factors, scale in (((1.0, 0.9, 0.8), "linear"), ((1.0, 0.1, 0.01), "log")):
        run = model("full", epochs=3)
        for column in ("train_loss", "holdout_loss"):
            run.history[column] = np.array(factors)
        *_, loss = shown(registry.figures()["training_curves"](Findings(run)))
        assert loss.get_yscale() == scale


def test_a_single_epoch_can_be_seen(model):
    for ax in shown(registry.figures()["training_curves"](Findings(model("full", epochs=1)))):
        points = [line.get_marker() for line in ax.lines if len(line.get_xdata()) == 1]
        assert points
        assert not {"", "None"} & set(points)


@pytest.mark.slow
def test_snapshots_of_one_run_are_one_curve(model):
    parts = [
        model("full"),
        model("full", snapshot="best", epochs=3),
        model("full", snapshot="initialisation", epochs=0),
    ]
    figure = registry.figures()["training_curves"](Findings(Measurements.concat(parts)))
    assert not figure.legends  # a single curve
    assert [text.get_text() for text in shown(figure)[0].texts] == ["4"]


@pytest.mark.slow
def test_a_panel_holds_what_may_be_compared(many):
    panels = panels_of(many.models)
    assert len(panels) == 2 * 2 * 2 + 1
    together = [{series.model for series in panel.series} for panel in panels]
    pairs, _ = find_pairs(many.models, attention=None)
    assert pairs
    assert all(any({pair.full, pair.counterpart} <= models for models in together) for pair in pairs)
    assert [panel.snapshot for panel in panels] == ["last"] * 5 + ["initialisation"] * 4
    assert "task unknown, seed unknown, last snapshot" in [panel.title for panel in panels]


def test_models_of_one_attention_in_one_panel_keep_their_names_apart(model):
    twice = Measurements.concat([model("topk", path="a.pt"), model("topk", path="b" * 60)])
    assert legend(registry.figures()["dispersion_by_layer"](Findings(twice))) == [
        "top-k (k = 3) a.pt",
        "top-k (k = 3) …" + "b" * 28,
    ]


def test_every_attention_has_a_look_of_its_own():
    looks = [attention_style(kind) for kind in (*ATTENTION_STYLES, "a kind without a style")]
    for aspect in ("color", "marker", "line"):
        assert len({getattr(look, aspect) for look in looks}) == len(looks)
    assert to_hex(looks[0].color) == "#3d3d3d"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_measurements_give_the_same_bytes(suffix, four, tmp_path):
    for folder in ("a", "b"):
        for name in ("dispersion_by_layer", "key_load"):
            save_figure(registry.figures()[name](Findings(four)), tmp_path / folder / name, [suffix])
    for name in ("dispersion_by_layer", "key_load"):
        first, second = ((tmp_path / folder / f"{name}.{suffix}").read_bytes() for folder in ("a", "b"))
        assert first == second


@pytest.mark.slow
def test_many_queries_do_not_make_a_large_file(model, theory, tmp_path):
    one = theory(model("full"))
    queries = one.queries.loc[one.queries.index.repeat(1000)].reset_index(drop=True)
    queries["dispersion"] *= np.random.default_rng(0).lognormal(size=len(queries))
    secants = one.secants.loc[one.secants.index.repeat(1000)].reset_index(drop=True)
    many = one.replace(queries=queries, secants=secants)
    for name in ("dispersion_by_layer", "key_load", "training_curves", "stability_curves"):
        for file in save_figure(registry.figures()[name](Findings(many)), tmp_path / name):
            assert file.stat().st_size < 200_000


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(InputError, match="png, svg, pdf"):
        save_figure(Figure(), tmp_path / "x", ["gif"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads_map"])
def test_text_is_legible_on_a_telephone(name, four, theory):
    with stacked():
        figure = registry.figures()[name](Findings(theory(four)))
    assert figure.get_figwidth() < 4
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) >= 9  # points: 12 pixels
    if name == "heads_map":
        assert "local blocks" in [text.get_text() for text in shown(figure)[0].texts]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training_curves", "heads_map"])
def test_no_text_is_lost_on_a_dark_page(name, make_four, theory, tmp_path):
    """Text has a dark counterpart, unless it lies on a cell, whose colour stays: there it is black or white."""
    four = make_four()
    four.history["train_loss"] /= 10.0 ** four.history["epoch"]  # powers of ten, which are drawn letter by letter
    four.history["train_accuracy"] /= 2  # nobody arrives
    (file,) = save_figure(registry.figures()[name](Findings(theory(four))), tmp_path / name, ["svg"])
    style, drawn = file.read_text(encoding="utf-8").split("</style>", 1)
    dark = re.findall(r'(text|tspan)\[style\*="fill: (#\w+)"\]', style)
    texts = re.findall(r'<(text|tspan)[^>]*?style="([^"]*)"[^>]*>([^<]*)', drawn)
    colors = {said: re.search(r"fill: (#\w+)", style) for _, style, said in texts}
    assert all(
        (tag, found[1]) in dark for tag, style, _ in texts if (found := re.search(r"fill: (#(?!f{6})\w+)", style))
    )
    cells = [said for said in colors if re.fullmatch(r"\d of \d|\d+%", said) and name != "training_curves"]
    assert bool(cells) == (name != "training_curves")
    assert all(colors[said] is None or colors[said][1] == "#ffffff" for said in cells)
    assert ("tspan" in {tag for tag, *_ in texts}) == (name == "training_curves")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_map_of_heads_says_before_which_layer_no_head_looks_at_the_first_key(depth):
    cells = [(layer, head) for layer in range(3) for head in range(2)]
    table = pd.DataFrame(cells, columns=["layer", "head"]).assign(first_weight=0.02)
    table.loc[(table["layer"] == depth) & (table["head"] == 1), "first_weight"] = 0.7
    said = heads._finding(table, "first_weight", None)
    assert said.endswith("at least half in 1 of 6 heads")
    assert re.findall(r"below 10% before layer (\d)", said) == ([str(depth)] if depth else [])


def test_a_map_on_a_dark_page_is_dark_and_on_paper_light(tmp_path):
    figure, (ax,) = panel_grid(1)
    cells = np.array([[0.0, 1.0], [np.nan, 0.5]])
    heat_map(ax, cells, Normalize(0, 1), "{:.1f}".format)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    column, row = ax.transData.transform((0.7, 0.3)).astype(int)
    drawn = np.asarray(canvas.buffer_rgba())[-row, column, :3]
    assert drawn.tolist() == list(matplotlib.colormaps["Blues"](1.0, bytes=True))[:3]
    (file,) = save_figure(figure, tmp_path / "map", ["svg"])
    text = file.read_text(encoding="utf-8")
    light, dark = (re.findall(rf'<g id="{page}-map-(\S+)"', text) for page in ("light", "dark"))
    assert light == dark
    assert len(light) == 2  # the cells, and the colour bar
    before, inside = text.partition("</style>")[0].split("@media", 1)
    assert "dark-map" in before
    assert "light-map" not in before
    assert re.search(r'"light-map"\]\{display:none\}\[id\^="dark-map"\]\{display:inline\}', inside)
    cells = dict(re.findall(r'<g id="(deep|pale)-cell-\d+-(\d-\d)"', text)[i][::-1] for i in range(3))
    assert cells == {"0-0": "pale", "0-1": "deep", "1-1": "pale"}


def test_pdf_text_stays_text():
    assert PAPER["pdf.fonttype"] == 42
