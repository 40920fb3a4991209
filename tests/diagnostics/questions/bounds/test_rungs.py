"""The gradient of the whole loss, its local bound and the worst case: by hand, and where one is not known."""

import math

import pandas as pd
import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.questions.bounds.answer import network_rungs, rungs_sentences
from semdiag.questions.bounds.measure import CONSTANTS, PARAMETERS

PLACES = {"local": ("network", "local"), "sound": ("network", "sound"), "any": ("network_any_residual", "local")}


def tables(gradients, finite=None, **values):
    rows = [
        {
            "quantity": PLACES[name][0],
            "form": PLACES[name][1],
            "ln_value": value,
            "ln_finite": value,
            "infinite": 0,
        }
        for name, value in values.items()
    ]
    of_all = pd.DataFrame(rows).assign(model="m", layer=-1, head=-1, holds=True, assumptions="")
    if finite is not None:
        tied = of_all["form"] == "sound"
        of_all.loc[tied, ["ln_value", "ln_finite", "infinite"]] = math.inf, finite, 3
    slopes = pd.DataFrame({"ln_gradient": gradients}).assign(
        model="m", tensor="t", layer=0, group="qk", infinite=0, holds=True
    )
    slopes = slopes.assign(**{name: 0.0 for name in PARAMETERS.columns if name not in slopes})
    return {"constants": CONSTANTS.of_parts([of_all]), "parameters": PARAMETERS.of_parts([slopes])}


def rungs(made_up, *args, **values):
    measured = made_up(("m", [0.1] * 4, {})).replace(**tables(*args, **values))
    return network_rungs(Findings(measured), "m")


def test_by_hand(made_up):
    """Gradients of 3 and 4 make one of 5; a key bias has none."""
    found = rungs(made_up, [math.log(3), math.log(4), -math.inf], local=4.0, any=10.0, sound=30.0)
    expected = {"gradient": math.log(5), "residual": 6.0, "point": 20.0, "left": 4 - math.log(5)}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    (said,) = rungs_sentences(found)
    assert "gradient 1.6, local bound 4.0, worst case 30.0. Of the 28.4 nats between" in said
    assert "residual explains 6.0 (21%), what else the point knows 20.0 (70%); 2.4 (8%) are left." in said


def test_one_tie_does_not_hide_the_other_inputs(made_up):
    assert rungs(made_up, [0.0], finite=20.0, local=4.0, any=10.0, sound=30.0)["sound"] == 20


@pytest.mark.parametrize("missing", ["local", "any", "sound"])
def test_what_is_not_known_is_not_said(made_up, missing):
    values = {name: 1.0 for name in PLACES if name != missing}
    assert rungs(made_up, [0.0], **values) == {}
    assert rungs(made_up, [math.nan], local=1.0, any=1.0, sound=1.0) == {}
    assert rungs(made_up, [0.0], local=math.nan, any=1.0, sound=1.0) == {}
    assert rungs_sentences({}) == []
