"""Verdicts on made-up tables, where the right word is known."""

import math

import numpy as np
import pandas as pd
import pytest

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.measuring.findings.findings import (
    Findings,
    Verdict,
    agreed,
    compared_pairs,
    differences,
    find_pairs,
    of_rows,
    pairs_against,
)
from semdiag.questions import registry
from semdiag.questions.bounds.answer import parameter_findings
from semdiag.questions.bounds.corollary import corollary_findings, pair_percentiles
from semdiag.questions.bounds.measure import CONSTANTS, PARAMETERS
from semdiag.questions.stability.answer import OF_PAIR, stability_findings
from semdiag.questions.stability.measure import SECANTS, with_bounds

TOPK = {"attention": "topk", "k": 2}


def secants(model, rows, same_set=True, log_odds=0.0):
    """Rows of (kept, weight change, ‖z − z'‖₁, ‖z − z'‖_∞, δ, Δ); a score falls as far as another rises."""
    names = ("kept", "weight_change", "score_change", "score_change_max", "dispersion", "separation")
    place = {"model": model, "sample": 0, "layer": 0, "head": 0, "query": range(len(rows)), "level": 0.01}
    values = dict(zip(names, zip(*rows, strict=True), strict=True))
    values |= {"score_change_range": 2 * np.array(values["score_change_max"]), "log_odds": log_odds}
    return pd.DataFrame({**place, **values, "same_set": same_set}).astype(SECANTS.columns)


def constants(model, **values):
    """Sound and paper λ_L, and λ_A of two layers, by natural logarithm; norms of 1."""
    rows = [("network", form, -1, -1, values[form]) for form in ("sound", "paper") if form in values]
    rows += [("attention_map", "sound", layer, 0, value) for layer, value in enumerate(values.get("maps", ()))]
    rows += [(name, "measured", 0, 0, 0.0) for name in ("gamma", "upsilon", "token_norm", "query_norm")]
    table = pd.DataFrame(rows, columns=["quantity", "form", "layer", "head", "ln_value"])
    unmet = ~np.isfinite(table["ln_value"])
    table = table.assign(model=model, holds=~unmet, assumptions=np.where(unmet, "a tie", ""))
    table = table.assign(infinite=unmet.astype(int), ln_finite=table["ln_value"].where(~unmet))
    return CONSTANTS.of_parts([table])


def one(findings, **where):
    found = [f for f in findings if all(getattr(f, name) == value for name, value in where.items())]
    assert len(found) == 1, found
    return found[0]


def test_words_of_rows():
    assert of_rows(5, 1, 9, 9) is Verdict.VIOLATED
    assert of_rows(5, 0, 9, 1) is Verdict.VACUOUS
    assert of_rows(1, 0, 0, 3) is Verdict.NOT_MET
    assert of_rows(0, 0, 0, 0) is Verdict.NOTHING
    assert agreed([]) is Verdict.NOTHING
    assert agreed([Verdict.HOLDS] * 2) is Verdict.HOLDS


def stability_of(made_up, kind, rows, **facts):
    measured = made_up(("m", [0.1] * 4, {**kind, **facts}))
    return stability_findings(Findings(measured.replace(secants=secants("m", rows))))


def test_the_paper_form_exceeded_and_the_sound_form_not(made_up):
    """40 keys, δ = 1: e/40 = 0.068 < a secant of 0.1 < ξ* = 0.122."""
    found = stability_of(made_up, {}, [(40, 0.1, 1.0, 1.0, 1.0, math.inf)])
    sound, paper = (
        one(f for f in found if "‖p − p'‖₁ ≤ ξ" in f.claim and f.form == form) for form in ("sound", "paper")
    )
    assert (sound.verdict, paper.verdict) == (Verdict.HOLDS, Verdict.VIOLATED)
    assert paper.numbers["largest measured over bound"] == pytest.approx(0.1 * 40 / math.e)
    assert paper.numbers["below the sound form"] == 1
    assert one(found, form="sound, row form").verdict is Verdict.HOLDS


def test_one_half_says_nothing(made_up):
    found = stability_of(made_up, {}, [(4, 0.1, 1.0, 0.5, 30.0, math.inf)] * 3)
    for form in ("sound", "paper"):
        finding = one(f for f in found if "≤ ξ ‖" in f.claim and f.form == form)
        assert (finding.verdict, finding.numbers["vacuous"]) == (Verdict.VACUOUS, 3)


@pytest.mark.slow
def test_of_a_pair_with_the_same_set_more_is_known(made_up):
    """δ = 30 says nothing, largest weights of odds e⁵ do: within a range of 1 odds e⁴·⁵, ξ = 0.0217."""
    measured = made_up(("m", [0.1] * 4, TOPK))
    row = (2, 0.02, 1.0, 0.5, 30.0, 1e-6)
    for same, change in ((True, 0.02), (True, 0.023), (False, 0.023)):
        table = secants("m", [(2, change, *row[2:])], same_set=same, log_odds=5.0)
        found = stability_findings(Findings(measured.replace(secants=table)))
        said = [f for f in found if "≤ ξ ‖" in f.claim]
        of_pair, of_all = (one(said, form=form) for form in (OF_PAIR, "sound"))
        exceeded = same and change > 2 * 0.010987 * 0.989013
        assert (of_pair.verdict is Verdict.VIOLATED) == exceeded
        assert of_all.verdict is Verdict.HOLDS
    tied = secants("m", [(2, 0.02, *row[2:5], 0.0)], log_odds=5.0)  # a tie that the noise did not undo
    found = stability_findings(Findings(measured.replace(secants=tied)))
    assert one(f for f in found if f.form == OF_PAIR).verdict is Verdict.HOLDS
    assert one(f for f in found if f.form == "sound" and "≤ ξ ‖" in f.claim).verdict is Verdict.NOT_MET


def test_a_change_beyond_the_sound_bound_is_a_violation(made_up):
    found = stability_of(made_up, {}, [(4, 0.6, 1.0, 0.5, 30.0, math.inf)])
    assert one(f for f in found if "≤ ξ ‖" in f.claim and f.form == "sound").verdict is Verdict.VIOLATED


def test_ties_of_heavy_hitters_break_the_assumption(made_up):
    rows = [(2, 0.1, 1.0, 1.0, 1.0, 0.0)] * 2 + [(2, 0.1, 1.0, 1.0, 1.0, 0.5)]
    finding = one(f for f in stability_of(made_up, TOPK, rows) if "≤ ξ ‖" in f.claim and f.form == "sound")
    assert (finding.verdict, finding.numbers["not_met"], finding.numbers["holds"]) == (Verdict.NOT_MET, 2, 1)
    assert "2 ties within rounding" in finding.note


def test_heavy_hitters_are_never_vacuous(made_up):
    found = stability_of(made_up, TOPK, [(2, 0.1, 1.0, 1.0, 30.0, 1e-6)])
    finding = one(f for f in found if "≤ ξ ‖" in f.claim and f.form == "sound")
    assert (finding.verdict, finding.numbers["promises no less than 2"]) == (Verdict.HOLDS, 1)


def test_a_kind_without_a_bound_is_said(made_up):
    found = stability_of(made_up, {"attention": "bottomk", "k": 2}, [(2, 0.1, 1.0, 1.0, 1.0, -1.0)])
    assert "no ξ is known for bottomk attention" in one(found, verdict=Verdict.NOT_MET).note
    pair = one(found, form=OF_PAIR)  # noise left its set as it was: of that pair ξ is known, ½ at odds of 1
    assert (pair.verdict, pair.numbers["vacuous"]) == (Verdict.VACUOUS, 1)
    rows = with_bounds(secants("m", [(2, 0.1, 1.0, 1.0, 1.0, -1.0)] * 2, same_set=[True, False]), "bottomk")
    assert np.isfinite(rows["ln_pair"]).tolist() == np.isfinite(rows["ln_row"]).tolist() == [True, False]
    assert rows["ln_sound"].isna().all()


def test_local_constants(made_up):
    measured = made_up(("m", [0.0, 0.0, 1.0, 30.0], {}))
    weights = measured.queries.assign(largest_weight=[0.25, 0.4, 0.3, 0.999])
    finding = one(stability_findings(Findings(measured.replace(queries=weights))))
    assert (finding.verdict, finding.numbers["violated"], finding.numbers["vacuous"]) == (Verdict.VIOLATED, 1, 1)
    assert finding.numbers["largest measured over bound"] == pytest.approx(0.48 / 0.375)
    assert one(stability_findings(Findings(measured))).numbers["violated"] == 0  # older tables without the column


def parameters(rows):
    table = pd.DataFrame(rows, columns=["tensor", "ln_sound", "ln_paper", "ln_gradient", "ln_secant", "holds"])
    table = table.assign(
        model="m", layer=0, group="qk", ln_local=table["ln_sound"] - 1, ln_point=math.nan, infinite=0
    )
    return PARAMETERS.of_parts([table])


def test_tensors(made_up):
    nan, inf = math.nan, math.inf
    table = parameters(
        [
            ("a", 5.0, 4.0, 0.0, 1.0, True),
            ("b", 0.5, nan, 1.0, 0.0, True),
            ("c", -inf, nan, -inf, -inf, True),
            ("d", inf, inf, 0.0, 0.0, False),
            ("e", 5.0, nan, nan, nan, True),
            ("f", 0.5, nan, 0.0, 1.0, True),
        ]
    )
    both = {"parameters": table, "constants": constants("m", sound=inf, paper=1.0)}
    found = parameter_findings(Findings(made_up(("m", [0.1] * 4, {})).replace(**both)))
    words = [one(found, where=name).verdict for name in "abcdef"]
    assert words[:3] == [Verdict.HOLDS, Verdict.VIOLATED, Verdict.HOLDS]
    assert words[3:] == [Verdict.NOT_MET, Verdict.NOTHING, Verdict.NOT_MET]
    assert "leaves the parameters for which" in one(found, where="f").note  # a bound there is one of the gradient
    assert one(found, where="a").numbers["log10 gap"] == pytest.approx(4 / math.log(10))
    assert one(found, where="d").note == "a tie"
    together = one(found, where="all", form="sound")
    assert (together.verdict, together.numbers["violated"], together.numbers["unmeasured"]) == (
        Verdict.VIOLATED,
        1,
        1,
    )
    assert one(found, where="all", form="paper").numbers["holds"] == 1
    assert one(found, where="all", form="local").numbers["violated"] == 2  # b and f: gradients above 0.5 − 1


def on_pairs(question, measured, pairs=None):
    pairs = find_pairs(measured.models, None)[0] if pairs is None else pairs
    return [finding for pair in pairs for finding in question(Findings(measured), pair)]


@pytest.fixture
def pair(made_up):
    """Call with dispersions of a full and a top-2 model; separations are a tenth of the latter's."""

    def make(full, masked, kind=TOPK, **tables):
        measured = made_up(("full", full, {}), ("mask", masked, kind))
        measured.provenance["dtype"] = "float64"
        return measured.replace(**tables)

    return make


def test_corollary_by_the_papers_equations(pair):
    measured = pair(np.linspace(1, 20, 8), np.linspace(0.5, 4, 8))
    pairs, _ = find_pairs(measured.models, None)
    found, table = on_pairs(corollary_findings, measured), pair_percentiles(Findings(measured), pairs[0])
    np.testing.assert_allclose(table.separation, np.percentile(np.linspace(0.05, 0.4, 8), [25, 10, 5, 0]))
    weight = paper_weight_condition(table.full_dispersion, table.dispersion, table.separation)
    inputs = paper_input_condition(table.full_dispersion, table.dispersion, table.separation, table.load / 2)
    for name, condition in (("W", weight), ("X", inputs)):
        of_form = [f for f in found if f.form == "paper" and f.claim.endswith(name)]
        for at, p in enumerate((75, 90, 95, 100)):
            finding = one(of_form, where=f"p{p}")
            assert finding.numbers["left side"] == pytest.approx(condition.left_side[at].item())
            assert (finding.verdict is Verdict.HOLDS) == bool(condition.met[at])
        assert one(of_form, where="all").verdict is agreed(f.verdict for f in of_form if f.where != "all")
    sound = [f for f in found if f.form == "sound" and f.claim.endswith("W")]
    assert {f.verdict for f in sound} == {Verdict.VIOLATED}  # never better
    missing = one(found, form="sound", claim="the mask has the better guarantee in X")
    assert missing.verdict is Verdict.NOTHING
    assert missing.note.endswith("norms are not known: measure them with semdiag bounds")


@pytest.mark.slow
def test_one_k_for_rows_of_different_length_is_said(pair):
    measured = pair(np.linspace(1, 20, 8), np.linspace(0.5, 4, 8))
    words = "one k stands for rows of 2 to 4 keys: this is not a bound"
    for tables in (measured, measured.replace(queries=measured.queries.assign(kept=[2, 3, 4, 4] * 4))):
        for finding in on_pairs(corollary_findings, tables):
            if finding.form == "sound" and finding.claim.endswith("W"):
                assert (words in finding.note) == (tables is not measured)


def test_the_papers_form_claims_nothing_where_its_assumptions_are_not_met(made_up):
    """Above the slopes, but the theorem speaks about another network: as in the sound form, assumption not met."""
    table = parameters([("a", 5.0, 4.0, 0.0, 1.0, True), ("b", 5.0, -1.0, 0.0, 1.0, True)])
    known = constants("m", sound=1.0, paper=1.0)
    at = known["form"] == "paper"
    known = known.assign(holds=~at, assumptions=np.where(at, "assumption not met: post-norm", ""))
    tables = {"parameters": table, "constants": known}
    found = parameter_findings(Findings(made_up(("m", [0.1] * 4, {})).replace(**tables)))
    paper = one(found, where="all", form="paper")
    assert (paper.verdict, paper.numbers["not_met"], paper.numbers["violated"]) == (Verdict.NOT_MET, 2, 0)
    assert paper.numbers["largest log10 gap"] == pytest.approx(4 / math.log(10) - 1 / math.log(10))
    assert one(found, where="all", form="sound").verdict is Verdict.HOLDS


def test_a_tie_at_the_smallest_separation(pair):
    measured = pair(np.linspace(1, 20, 8), [1e-15, 1, 1, 1, 1, 1, 1, 4])
    found = on_pairs(corollary_findings, measured)
    finding = one((f for f in found if f.form == "paper" and f.claim.endswith("W")), where="p100")
    assert finding.verdict is Verdict.NOT_MET
    assert "is a tie within rounding" in finding.note
    assert (  # the word over all percentiles is that of p75 to p95
        one((f for f in found if f.form == "paper" and f.claim.endswith("W")), where="all").verdict
        is Verdict.HOLDS
    )


@pytest.mark.slow
def test_what_is_a_tie_grows_with_the_scores(pair):
    """Scores around 10^4 of a range of 20 nats are rounded at 10^-12: a separation of 10^-12 may be a tie."""
    measured = pair(np.linspace(1, 20, 8), [1e-11, 1, 1, 1, 1, 1, 1, 4])
    measured.provenance["dtype"] = "float64"
    pairs = find_pairs(measured.models, None)[0]
    assert pair_percentiles(Findings(measured), pairs[0]).separation[-1] == pytest.approx(1e-12)
    reach = constants(pairs[0].counterpart, sound=1.0)
    reach.loc[0, ["quantity", "form", "ln_value"]] = ["score_reach", "measured", math.log(1e4)]
    large = Findings(measured.replace(constants=reach))
    assert pair_percentiles(large, pairs[0]).separation[-1] == 0
    for finding in on_pairs(corollary_findings, measured.replace(constants=reach)):
        if finding.where == "p100":
            assert (finding.verdict, finding.numbers["Δ"]) == (Verdict.NOT_MET, 0.0)


def test_the_control_of_theorem_4(pair):
    measured = pair([4.0] * 4, [4.0] * 4, {"attention": "banded", "k": 2})
    found = on_pairs(corollary_findings, measured)
    for form, name, threshold in (("paper", "W", 1.0), ("sound", "W", 0.0)):
        finding = one((f for f in found if f.form == form and f.claim.endswith(name)), where="p100")
        side = finding.numbers["left side" if form == "paper" else "ln margin"]
        assert (side, finding.verdict) == (threshold, Verdict.VIOLATED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "k"),
    [
        ({"attention": "banded", "k": 2, "global_tokens": 1}, 3),
        ({"attention": "block", "k": 2, "global_tokens": 1, "pooling": "cls"}, 4),
        ({"attention": "random", "k": 2, "pooling": "cls"}, 2),
    ],
)
def test_global_tokens_count_among_the_keys_of_a_fixed_mask(pair, local, k):
    def sides(facts):
        measured = pair([4.0] * 4, [2.0, 3.0, 3.0, 4.0], facts)
        pairs = pairs_against(measured.models, "full")
        return [
            f.numbers["left side"]
            for f in on_pairs(corollary_findings, measured, pairs)
            if f.where == "p100" and f.form == "paper"
        ]

    assert sides(local) == sides({"attention": "banded", "k": k})
    assert sides(local) != sides({"attention": "banded", "k": k + 1})


def test_bottom_k_is_not_judged_by_corollary_1(pair):
    measured = pair([4.0] * 4, [1.0] * 4, {"attention": "bottomk", "k": 2})
    finding = one(on_pairs(corollary_findings, measured))
    assert finding.verdict is Verdict.NOTHING
    assert "these are full and bottomk" in finding.note


def test_layer_by_layer_and_with_own_norms(pair):
    both = pd.concat([constants("full", maps=[3.0, 3.0]), constants("mask", maps=[2.0, math.inf])])
    measured = pair([4.0] * 4, [1.0] * 4, constants=both)
    found = on_pairs(corollary_findings, measured)
    assert one(found, where="layer 0").numbers["ln margin"] == -1
    assert [one(found, where=f"layer {n}").verdict for n in (0, 1)] == [Verdict.HOLDS, Verdict.NOT_MET]
    assert one(found, where="layer 1").note == "a tie"
    assert len([f for f in found if f.form == "sound" and f.claim.endswith("X") and f.where.startswith("p")]) == 4


def test_masks_of_different_k_cannot_be_compared_and_it_is_said(made_up):
    measured = made_up(("a", [1] * 4, TOPK), ("b", [1] * 4, {"attention": "topk", "k": 3, "seed": 2}))
    pairs = pairs_against(measured.models, "a")
    found = one(on_pairs(corollary_findings, measured, pairs))
    assert found.verdict is Verdict.NOTHING
    assert "these are topk and topk; seed 1 and 2; k 2 and 3" in found.note
    assert differences(measured.models, pairs[0]) == ["seed 1 and 2", "k 2 and 3"]


def test_pairs_with_a_reference(made_up):
    measured = made_up(("full", [1] * 4, {}), ("a", [1] * 4, TOPK), ("b", [1] * 4, {"attention": "block", "k": 2}))
    assert [(p.full, p.counterpart) for p in compared_pairs(Findings(measured))] == [("full", "a"), ("full", "b")]
    measured.provenance["against"] = "a"
    assert [(p.full, p.counterpart) for p in compared_pairs(Findings(measured))] == [("full", "a"), ("a", "b")]
    assert (
        compared_pairs(Findings(measured))[0].label
        == "even-pairs, full, seed 1, last against even-pairs, topk-2, seed 1, last"
    )


@pytest.mark.slow
def test_pairs_with_the_same_label_are_told_apart(made_up):
    """Labels name task, attention and seed, which two sizes of a model share; and then the path, too."""
    measured = made_up(*(
        (f"{kind} {width}", [scale * d for d in (1, 2, 3, 4)], {**facts, "width": width})
        for width, scale in ((16, 1.0), (32, 2.0))
        for kind, facts in (("full", {}), ("mask", TOPK))
    ))  # fmt: skip
    findings = Findings(measured)
    (small, large) = findings(compared_pairs)
    assert (small.label, large.label) == tuple(f"even-pairs, topk-2, seed 1, mask {width}" for width in (16, 32))
    for label in (small.label, large.label):
        (judged,) = (pair for pair in findings(compared_pairs) if pair.label == label)
        of_w = [f for f in findings(corollary_findings, judged) if (f.form, f.where) == ("paper", "p75")]
        assert len(of_w) == 2  # W and X
    summary = registry.QUESTIONS["bounds"].json(findings)["pairs"]
    assert [len(pair["verdicts"]) for pair in summary] == [16, 16]
