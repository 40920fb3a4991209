"""Render the page of a report from its template."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from typing import Any

import pandas as pd
from markupsafe import Markup, escape

from semdiag.capturing.attention_call import EXTERNAL_SOURCES, external
from semdiag.measuring.findings.findings import (
    Completeness,
    Findings,
    completeness,
    modules_by_layer,
    records,
    seed_sentence,
    unlearned_sentences,
)
from semdiag.measuring.words import count, counted, layer_name, number, percent, plain, text
from semdiag.presenting.answer import Answer, Claim, Heading, numbered_claims, page_environment, page_style
from semdiag.presenting.question import Place
from semdiag.presenting.tables import Column, NumberTable
from semdiag.questions.heads import head_cells, outlying_heads
from semdiag.questions.registry import QUESTIONS


def captured_sentence(findings: Findings) -> str:
    """Return how much of the attention was captured, and the largest residual."""
    measurements = findings.measurements
    models = measurements.models
    diverged = models["model"].isin(measurements.non_finite["model"])
    modules = int(models["attention_found"].sum())
    words = f"Captured: {int(models['attention_captured'].sum())} of {modules} attention modules; "
    if diverged.all():
        return words + (
            "the residual (how far attention recomputed from the capture deviates) is unknown, because scores are "
            "not numbers."
        )
    worst = models.loc[~diverged, "residual"].max(skipna=False)
    return words + (
        "the largest residual (how far attention recomputed from the capture deviates from what the model "
        f"computed) is {_one_digit(worst)}."
    )


_one_digit = partial(number, digits=1, unknown="undefined")


def incomplete_sentences(findings: Findings) -> list[str]:
    """Return warnings about models of which attention was missed, or may have been."""
    measurements = findings.measurements
    diverged = set(measurements.non_finite["model"])
    sentences = []
    for row in records(measurements.models):
        sentences += _skipped_sentences(measurements.skipped, row)
        if row["model"] not in diverged:
            sentences += _residual_sentences(row)
    return sentences


def _skipped_sentences(skipped: pd.DataFrame, row: Mapping[str, Any]) -> list[str]:
    of_model = records(skipped[skipped["model"] == row["model"]])
    reasons = [f"{entry['module'] or 'the model'}: {entry['reason']}" for entry in of_model]
    if not reasons and row["attention_captured"] >= row["attention_found"]:
        return []
    listed = "; ".join(reasons[:3])
    if len(reasons) > 3:
        listed += "; …"
    return [f"Warning: not every attention layer was captured of {row['model']}. {listed}".rstrip()]


def _residual_sentences(row: Mapping[str, Any]) -> list[str]:
    answer = completeness(row)
    residual = _one_digit(row["residual"])
    if answer is Completeness.COMPLETE:
        return []
    if answer is Completeness.BLIND:
        return [
            f"Outputs of {row['model']} may be off by rounding, which is so coarse at this precision "
            f"(residual {residual}) that nothing tells whether all attention was captured; float32 would."
        ]
    if not math.isnan(row["residual_over_rounding"]):
        residual += f", {row['residual_over_rounding']:.2g} times what rounding can do"
    return [
        f"Warning: the residual of {row['model']} is {residual}. Part of its attention was not "
        "captured, so its numbers may mean nothing; the last section says in which layer."
    ]


def diverged_sentences(findings: Findings) -> list[str]:
    """Return a warning for each model that has scores which are NaN or infinite."""
    sentences = []
    models = findings.measurements.models
    foreign = set(models.loc[external(models), "model"])
    for model, rows in findings.measurements.non_finite.groupby("model", sort=False):
        first = rows.sort_values(["layer", "head"]).iloc[0]
        layer = layer_name(int(first["layer"]), findings(modules_by_layer, str(model)))
        advice = (
            "Look for NaN or infinite numbers in its weights and inputs"
            if model in foreign
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
_MODEL = Column("model", form=text)
_ATTENTION = Column("attention_label", "attention", text)
_SEED = Column("seed", form=plain)
_RESIDUAL = Column("residual")
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


BEFORE_ALL = ("weights-not-loaded", "not-learned")  # cautions that come before any answer


def caution_claims(findings: Findings) -> list[Claim]:
    """Return what a reader must know before believing any number of a report."""
    return [
        *numbered_claims("weights-not-loaded", weights_sentences(findings)),
        *numbered_claims("not-learned", unlearned_sentences(findings)),
        *numbered_claims("incomplete", incomplete_sentences(findings)),
        *numbered_claims("diverged", diverged_sentences(findings)),
        *numbered_claims("short-texts", short_text_sentences(findings)),
    ]


@dataclass(frozen=True)
class Overview:
    """The claims of a report that belong to no section, and the one that leads its page."""

    lead: Claim
    question: str  # of the lead; empty: it is one of the others here
    cautions: Sequence[Claim] = ()
    remarks: Sequence[Claim] = ()  # on what was measured

    def without_lead(self, claims: Sequence[Claim]) -> list[str]:
        """Return the sentences of cautions or remarks but the lead's."""
        return [claim.sentence for claim in claims if not self.leads("", claim)]

    def leads(self, question: str, claim: Claim) -> bool:
        """Return whether the claim of a question is the lead, which a page says once, at its top."""
        return self.question == question and self.lead.key == claim.key


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


def inline_picture(svg: str, tooltips: Mapping[str, str]) -> Markup:
    """Return an SVG for a page: its lines named by kind, values as tooltips, and no identifiers of its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], count=1, flags=re.S)

    def group(match: re.Match[str]) -> str:
        words = tooltips.get(match[0][7:-2])
        title = f"<title>{escape(words)}</title>" if words else ""
        return f'<g class="{match[2]}" data-kind="{match[1]}">{title}'

    svg = _PART.sub(group, svg)
    used = set(re.findall(r"#([\w-]+)", svg))
    return Markup(re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", svg))


@dataclass(frozen=True)
class Section:
    """A heading of a question with its figures, and what stands under it."""

    name: str  # of the question
    heading: Heading
    place: Place
    leads: bool = False  # whether the lead of the page is its claim
    answer: str = ""  # its tile in a sentence; empty where the lead says the same
    headline: Sequence[str] = ()
    more: Sequence[str] = ()
    tables: Sequence[NumberTable] = ()


def _sections(
    parts: Sequence[tuple[str, Sequence[Heading]]], answers: Mapping[str, Answer], overview: Overview
) -> list[Section]:
    """Return the sections of all questions; few of them all stand on the first screen."""
    sections = []
    for name, headings in parts:
        question = QUESTIONS[name]
        for heading in headings:
            if heading is _answered_heading(headings, question.tile_anchor):
                sections.append(_answering_section(name, heading, answers[name], overview))
            else:
                sections.append(Section(name, heading, question.place))
    if len(parts) < 3 or not any(section.place == "screen" for section in sections):
        return [replace(section, place="screen") for section in sections]
    return sections


def _answered_heading(headings: Sequence[Heading], anchor: str) -> Heading | None:
    """Return the heading under which the answer stands: that of an anchor, else the first."""
    anchored = [heading for heading in headings if heading.anchor == anchor]
    return next(iter([*anchored, *headings]), None)


def _answering_section(name: str, heading: Heading, answer: Answer, overview: Overview) -> Section:
    """Return the section with a question's answer: under its tile, or what else there is where its claim leads."""
    leads = overview.question == name
    glance = None if leads else answer.glance
    headline = [claim for claim in answer.headline if not overview.leads(name, claim)]
    tile = ""
    if glance is not None:
        tile = " ".join(filter(None, (glance.number, glance.words)))
        tile = f"{tile[:1].upper()}{tile[1:]}."
        headline = [claim for claim in headline if claim.id != glance.claim_id]
    details = answer.details or ()
    return Section(
        name,
        heading,
        QUESTIONS[name].place,
        leads,
        answer=tile,
        headline=[claim.sentence for claim in headline],
        more=[each.sentence for each in details if isinstance(each, Claim) and not overview.leads(name, each)],
        tables=[each for each in details if not isinstance(each, Claim)],
    )


def render_page(
    findings: Findings,
    content: dict[str, Any],
    answers: Mapping[str, Answer],
    overview: Overview,
    parts: Sequence[tuple[str, Sequence[Heading]]],
    pictures: dict[str, Picture],
    keep_queries: bool,
    theory: Sequence[str],
    look: str | None,
) -> str:
    """Fill the template; every value is escaped, and control characters are made visible."""
    rows = content["results"]
    all_external = all(row["source"] in EXTERNAL_SOURCES for row in rows)
    provenance = {name: value for name, value in content["provenance"].items() if name != "command"}
    source = files("semdiag.reporting").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    return (
        page_environment()
        .from_string(source)
        .render(
            page_style=Markup(page_style()),
            report=content,
            parts=_sections(parts, answers, overview),
            pictures=pictures,
            missing={name for name, picture in pictures.items() if picture.missing},
            models=_attention_names(rows),
            title=str(rows[0]["model"])[-60:] if len(rows) == 1 else f"{len(rows)} models",
            about=_about(content, seed_sentence(findings.measurements.models)),
            made_with=_settings(provenance),
            lead=overview.lead.sentence,
            cautions=overview.without_lead(overview.cautions),
            rest=overview.without_lead(overview.remarks),
            external=all_external,
            head_map=findings(head_cells) if "heads" in answers else None,
            look=look,
            tables={
                "encoders": ENCODERS,
                "external": EXTERNAL,
                "measured": [column for column in MEASURED if column.name != "seed" or not all_external],
                "layers": LAYERS,
            },
            sections={name for name, _ in parts},
            non_finite=findings.measurements.non_finite.to_dict("records"),
            keep_queries=keep_queries,
            theory=theory,
            outliers=_outliers(findings, str(rows[0]["model"]), look),
        )
    )


def _attention_names(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which attention was measured, and in which task or model."""
    names = set()
    for row in rows:
        where = row["model"] if row["source"] in EXTERNAL_SOURCES else row["task"] or "task unknown"
        names.add(f"{row['attention_label']} ({where})")
    return ", ".join(sorted(names))


def _outliers(findings: Findings, model: str, look: str | None) -> list[tuple[str, str | None, str]]:
    """Return the heads that stand out: name, the place on the page of one text, and in what."""
    modules = findings(modules_by_layer, model)
    return [
        (f"head {head} of layer {layer_name(layer, modules)}", look and f"{look}#{layer}.{head}", words)
        for layer, head, words in findings(outlying_heads)
    ]


def _about(content: dict[str, Any], seeds: str) -> str:
    rows = content["results"]
    provenance = content["provenance"]
    model = str(rows[0]["model"]) if len(rows) == 1 else f"{len(rows)} models"
    counts = sorted({int(row["samples"]) for row in rows})
    samples = counted(counts[0], "sample")
    if len(counts) > 1:
        samples = f"{counts[0]:,} to {counts[-1]:,} samples"
    inputs = dict.fromkeys(str(row["inputs"]) for row in rows)
    if len(inputs) == 1:
        samples += f": {next(iter(inputs))}"
    version = provenance.get("semdiag")
    parts = (model, samples, seeds.rstrip("."), provenance.get("date"), version and f"semdiag {version}")
    return " · ".join(part for part in parts if part)


def _settings(named: Mapping[str, Any]) -> str:
    """Return settings in words, like ``seed 0, noise 0.01, mask noise (levels 0.01, draws 3)``."""
    return ", ".join(f"{name.replace('_', ' ')} {_setting(value)}" for name, value in named.items())


def _setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_settings(value)})"
    if isinstance(value, list | tuple):
        return " ".join(map(_setting, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value}"
