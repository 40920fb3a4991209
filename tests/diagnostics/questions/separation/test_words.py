"""How many queries are said to have no separation, and of how many."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import measure
from semdiag.questions.separation.answer import separation_claims


def test_only_queries_that_drop_a_key_are_counted(wild_encoder, padded_tokens):
    """A short sample keeps all of its keys: its queries have no Δ that could be positive."""
    measurements = measure(wild_encoder("topk", length=12), padded_tokens[0])
    queries = measurements.queries.copy()
    dropping = queries.index[queries["kept"] < queries["keys"]]
    assert 2 < len(dropping) < len(queries)
    queries.loc[dropping[:2], "separation"] = 0.0
    (claim,) = separation_claims(Findings(measurements.replace(queries=queries)))
    assert f"and 2 of {len(dropping)} have none (Δ ≤ 0, a tie)" in claim.sentence
