"""How many queries are said to have a separation that is not positive, and of how many."""

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measure import measure
from semdiag.questions.separation.words import separation_in_short


def test_only_queries_that_drop_a_key_are_counted(wild_encoder, padded_tokens):
    """A short sample keeps all of its keys: its queries have no Δ that could be positive."""
    measurements = measure(wild_encoder("topk", length=12), padded_tokens[0])
    queries = measurements.queries
    dropping = queries[queries["kept"] < queries["keys"]]
    assert 0 < len(dropping) < len(queries)
    (sentence,) = separation_in_short(Findings(measurements))
    assert f"and {(dropping['separation'] <= 0).sum()} of {len(dropping)} are not positive" in sentence
