"""What conftest.py leaves of products of parameters: pytest's own parts that it reads are looked at here."""

import os

import pytest


@pytest.mark.parametrize("first", ["a", "b", "c"])
@pytest.mark.parametrize("second", [0, 1, 2])
@pytest.mark.parametrize("third", [(), (1,), (1, 2)])
def test_a_product_is_thinned_and_holds_every_value(first, second, third, request):
    name = request.node.originalname
    cases = [item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == name]
    assert third in [case["third"] for case in cases]
    assert len(cases) <= (27 if os.environ.get("SEMDIAG_EVERY_CASE") else 15)
    if request.config.option.markexpr == "not slow":
        assert [sorted(map(str, {case[name] for case in cases})) for name in ("first", "second")] == [
            ["a", "b", "c"],
            ["0", "1", "2"],
        ]
        assert len(cases) <= 9
