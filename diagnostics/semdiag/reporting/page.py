"""Render the page of a report from its template."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from semdiag.capturing.attention_call import EXTERNAL_SOURCES, external
from semdiag.measuring.findings.findings import Completeness, Findings, completeness, modules_by_layer, records
from semdiag.measuring.words import count, layer_name, number, percent, plain, text
from semdiag.presenting.answer import Answer, Heading, page_environment, page_style
from semdiag.presenting.tables import Column
from semdiag.questions.heads import head_cells, outlying_heads
from semdiag.questions.registry import QUESTIONS


def capture_sentences(findings: Findings) -> list[str]:
    """Return how much of the attention was captured, and whether each capture is complete."""
    measurements = findings.measurements
    models = measurements.models
    layers, captured = int(models["attention_found"].sum()), int(models["attention_captured"].sum())
    diverged = models["model"].isin(measurements.non_finite["model"])
    worst = models.loc[~diverged, "residual"].max(skipna=False)
    sentences = [
        f"Captured: {captured} of {layers} attention modules; "
        + (
            "the residual (how far attention recomputed from the capture deviates) is unknown, because scores are "
            "not numbers."
            if diverged.all()
            else "the largest residual (how far attention recomputed from the capture deviates from what the "
            f"model computed) is {number(worst, 1, unknown='undefined')}."
        )
    ]
    for row in records(models.assign(diverged=diverged)):
        skipped = measurements.skipped[measurements.skipped["model"] == row["model"]]
        reasons = [f"{s['module'] or 'the model'}: {s['reason']}" for s in skipped.to_dict("records")]
        if row["attention_captured"] < row["attention_found"] or reasons:
            listed = "; ".join(reasons[:3]) + ("; …" if len(reasons) > 3 else "")
            sentences.append(
                f"Warning: not every attention layer was captured of {row['model']}. {listed}".rstrip()
            )
        answer, residual = completeness(row), number(row["residual"], 1, unknown="undefined")
        if answer is Completeness.BLIND and not row["diverged"]:
            sentences.append(
                f"Outputs of {row['model']} may be off by rounding, which is so coarse at this precision "
                f"(residual {residual}) that nothing tells whether all attention was captured; float32 would."
            )
        elif not row["diverged"] and answer is not Completeness.COMPLETE:
            times = row["residual_over_rounding"]
            more = "" if math.isnan(times) else f", {times:.2g} times what rounding can do"
            sentences.append(
                f"Warning: the residual of {row['model']} is {residual}{more}. Part of its attention was not "
                "captured, so its numbers may mean nothing; the last section says in which layer."
            )
    return sentences


def diverged_sentences(findings: Findings) -> list[str]:
    """Return a warning for each model that has scores which are NaN or infinite."""
    sentences = []
    bad, models = findings.measurements.non_finite, findings.measurements.models
    others = set(models.loc[external(models), "model"])
    for model, rows in bad.groupby("model", sort=False):
        first = rows.sort_values(["layer", "head"]).iloc[0]
        layer = layer_name(int(first["layer"]), findings(modules_by_layer, str(model)))
        advice = (
            "Look for NaN or infinite numbers in its weights and inputs"
            if model in others
            else "If it was trained so, train it again with a smaller --learning-rate or --gradient-clip"
        )
        sentences.append(
            f"Diverged: {int(rows['scores'].sum()):,} attention scores of {model} are NaN or infinite, first in "
            f"layer {layer}, head {first['head']}, so what is reported of it means nothing, and no probe "
            f"was run on it. {advice}."
        )
    return sentences


def weights_sentences(findings: Findings) -> list[str]:
    """Return a warning for each model that was built without some of its weights: random ones mean nothing."""
    remarks = findings.measurements.remarks
    lost = remarks[remarks["code"] == "weights-not-loaded"]
    return [f"Warning: of {row['model']}, {row['text']}." for row in records(lost)]


def short_text_sentences(findings: Findings) -> list[str]:
    """Return a caution for each model that was measured on texts far shorter than it takes."""
    remarks = findings.measurements.remarks
    short = records(remarks[remarks["code"] == "short-texts"])
    if len(findings.measurements.models) > 1:
        return [f"{row['model']}: {row['text']}." for row in short]
    return [f"{row['text'][:1].upper()}{row['text'][1:]}." for row in short]


_PERCENTILES = tuple(Column(f"dispersion.all.{p}", f"δ {p}") for p in ("p50", "p75", "p90", "p95", "p100"))
_MODEL, _ATTENTION = Column("model", form=text), Column("attention_label", "attention", text)
_SEED, _RESIDUAL = Column("seed", form=plain), Column("residual")
ENCODERS = (
    Column("task model", "task", lambda *names: next(filter(None, names)), left=True), _ATTENTION, _SEED,
    Column("snapshot", form=text),
    Column("epoch", form=plain), Column("accuracy", form=percent), Column("epochs_to_95", "epochs\nto 95%", plain),
    *_PERCENTILES, Column("smaller", "δₕ < δₛ", text),
)  # fmt: skip
EXTERNAL = (
    _MODEL, _ATTENTION, Column("blocks", "layers"), Column("heads"), Column("samples"), *_PERCENTILES,
    Column("attention_captured attention_found", "captured", "{} of {}".format), _RESIDUAL,
)  # fmt: skip
MEASURED = (
    _MODEL, _ATTENTION, _SEED, Column("samples"), Column("inputs", form=text),
    Column("attention_found attention_captured", "attention layers\nfound / captured", "{} / {}".format),
    _RESIDUAL,
    Column("dispersion.all.queries", "queries", count), Column("dispersion.all.undefined", "undefined δ", count),
    Column("blocks heads", "blocks × heads", "{} × {}".format), Column("parameters", form=count),
    Column("sha256", "SHA-256", lambda sha: Markup("<code>{}</code>").format((sha or "–")[:12]), left=True),
)  # fmt: skip
LAYERS = (
    Column("layer"), Column("module", form=lambda name: name or "the model", left=True),
    Column("occurrence", "call"), Column("mask", form=text), Column("heads"), Column("key_heads"), Column("width"),
    Column("mechanism", "captured by", text), Column("calls"), Column("residual"),
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A figure on the page: files by format, size in CSS pixels, or why it is missing."""

    files: dict[str, str] = field(default_factory=dict)
    width: int = 0
    height: int = 0
    missing: str | None = None
    narrow: str | None = None
    shows: str = ""
    note: str = ""
    finding: str = ""
    inline: Sequence[Markup] = ()


_PART = re.compile(r'<g id="(?:\w+?)-([\w-]+?)--(\w+?)(-\d+)?">')


def inline_picture(svg: str, said: Mapping[str, str]) -> Markup:
    """Return an SVG for a page: its lines named by kind, values as tooltips, and no identifiers of its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], count=1, flags=re.S)

    def part(found: re.Match[str]) -> str:
        words = said.get(found[0][7:-2])
        title = f"<title>{escape(words)}</title>" if words else ""
        return f'<g class="{found[2]}" data-kind="{found[1]}">{title}'

    svg = _PART.sub(part, svg)
    used = set(re.findall(r"#([\w-]+)", svg))
    return Markup(re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", svg))


def unsaid(sentences: Sequence[str], said: Sequence[str]) -> list[str]:
    """Return sentences without what was said already."""
    left = []
    for sentence in sentences:
        for other in said:
            place = sentence.find(other[1:])
            if place > 0:
                sentence = sentence[: place - 1] + sentence[place + len(other) :].lstrip()
        left.append(sentence.strip())
    return [sentence for sentence in left if sentence and not sentence.endswith(":")]


def render_page(
    findings: Findings,
    content: dict[str, Any],
    answers: Mapping[str, Answer],
    parts: Sequence[tuple[str, Sequence[Heading]]],
    pictures: dict[str, Picture],
    keep_queries: bool,
    theory: Sequence[str],
    look: str | None,
) -> str:
    """Fill the template; every value is escaped, and control characters are made visible."""
    rows, non_finite = content["results"], findings.measurements.non_finite
    lead, glances = content["verdict"][0], content["glances"]
    modules = findings(modules_by_layer, rows[0]["model"])
    sections = []
    for name, headings in parts:
        number = glances[name]["number"] if name in glances and len(rows) == 1 else ""  # it stands in the heading
        tile = f"{glances[name]['number']} {glances[name]['words']}." if name in glances else ""  # likewise
        own = [s for s in answers[name].headline if s == lead or not (s == tile or (number and number in s))]
        above = unsaid(own, [lead])
        more = unsaid(content["details"].get(name, []), [lead, *above])
        tables = [each for each in answers[name].details or () if not isinstance(each, str)]
        for heading in headings:
            glanced = [each for each in headings if each.anchor == QUESTIONS[name].tile_anchor]
            first = heading is (glanced or headings)[0]
            glance = glances.get(name) if first else None
            repeated = glance and glance["words"] in " ".join([lead, *above])
            answer = glance and not repeated and " ".join(filter(None, (glance["number"], glance["words"])))
            sections.append(
                {
                    "name": name, "heading": heading, "answer": answer and answer[:1].upper() + answer[1:] + ".",
                    "headline": above if first else [], "more": more if first else [],
                    "tables": tables if first else (), "place": QUESTIONS[name].place,
                }
            )  # fmt: skip
    said = {*content["cautions"], *(sentence for answer in answers.values() for sentence in answer.headline)}
    rest = [sentence for sentence in content["verdict"][1:] if sentence not in said]
    if len(parts) < 3 or not any(section["place"] == "screen" for section in sections):
        sections = [{**section, "place": "screen"} for section in sections]
    others = [row["source"] in EXTERNAL_SOURCES for row in rows]
    named = {
        f"{row['attention_label']} ({row['model'] if other else row['task'] or 'task unknown'})"
        for row, other in zip(rows, others, strict=True)
    }
    source = files("semdiag.reporting").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    return (
        page_environment()
        .from_string(source)
        .render(
            page_style=Markup(page_style()),
            report=content,
            parts=sections,
            pictures=pictures,
            missing={name for name, picture in pictures.items() if picture.missing},
            models=", ".join(sorted(named)),
            title=str(rows[0]["model"])[-60:] if len(rows) == 1 else f"{len(rows)} models",
            about=_about(content),
            made_with=_settings(
                {name: value for name, value in content["provenance"].items() if name != "command"}
            ),
            lead=lead,
            rest=rest,
            external=all(others),
            head_map=findings(head_cells) if "heads" in answers else None,
            look=look,
            tables={
                "encoders": ENCODERS,
                "external": EXTERNAL,
                "measured": [column for column in MEASURED if column.name != "seed" or not all(others)],
                "layers": LAYERS,
            },
            sections={name for name, _ in parts},
            non_finite=non_finite.to_dict("records"),
            keep_queries=keep_queries,
            theory=theory,
            outliers=[
                (f"head {head} of layer {layer_name(layer, modules)}", look and f"{look}#{layer}.{head}", words)
                for layer, head, words in findings(outlying_heads)
            ],
        )
    )


def _about(content: dict[str, Any]) -> str:
    rows = content["results"]
    model = str(rows[0]["model"]) if len(rows) == 1 else f"{len(rows)} models"
    counts = sorted({int(row["samples"]) for row in rows})
    samples = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    inputs = dict.fromkeys(str(row["inputs"]) for row in rows)
    of = f": {next(iter(inputs))}" if len(inputs) == 1 else ""
    provenance = content["provenance"]
    samples += f" sample{'s' * (counts != [1])}"
    version = provenance.get("semdiag")
    parts = (model, samples + of, provenance.get("date"), version and f"semdiag {version}")
    return " · ".join(part for part in parts if part)


def _settings(named: Mapping[str, Any]) -> str:
    """Return settings in words, like ``seed 0, noise 0.01, mask noise (levels 0.01, draws 3)``."""

    def said(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"({_settings(value)})"
        if isinstance(value, list | tuple):
            return " ".join(map(said, value))
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value}"

    return ", ".join(f"{name.replace('_', ' ')} {said(value)}" for name, value in named.items())
