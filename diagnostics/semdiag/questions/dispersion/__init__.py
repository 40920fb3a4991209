"""How far apart are the scores that a query mixes?"""

from semdiag.presenting.question import SAMPLING, Question

QUESTION = Question(
    "dispersion",
    __name__,
    """Measure semantic dispersion δ: how far apart the scores of a query are.

    δ is a query's largest score minus its smallest, over all keys for full attention and over the kept keys for
    sparse attention (paper, eq. 19). A small δ means a stable softmax. Shown per layer and head, as percentiles
    over queries, in nats.

    [bold]semdiag dispersion checkpoints/even-pairs-full-seed-153476998 --k 5[/]
    """,
    takes=("k", "every", *SAMPLING),
    leave_out=(),
)
