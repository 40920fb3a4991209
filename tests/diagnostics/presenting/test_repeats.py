"""Options that say how often something is repeated."""

import pytest

from semdiag.questions.landscape import LandscapePlan
from semdiag.questions.lipschitz import LipschitzPlan
from semdiag.questions.mask_stability import NoisePlan
from semdiag_files import InputError


@pytest.mark.parametrize(
    ("plan", "option"),
    [(NoisePlan, "draws"), (LipschitzPlan, "directions"), (LipschitzPlan, "planes"), (LandscapePlan, "planes")],
)
@pytest.mark.parametrize("number", [0, 10**6 + 1, 2**63])
def test_repeats_without_end_are_refused(plan, option, number):
    with pytest.raises(InputError, match=f"{option} must be at (least|most)"):
        plan(**{option: number})
