"""How far apart are kept and dropped keys, and which keys are relied on?"""

from semdiag.presenting.question import SAMPLING, Question

QUESTION = Question(
    "separation",
    __name__,
    """Measure semantic separation Δ and key load: how clear-cut is the mask, and which keys are used?

    Δ is a query's smallest kept score minus its largest dropped one (paper, Def. 3). The larger Δ is, the more the
    input may change before the mask does. Δ is undefined for full attention, which drops nothing. It can be
    negative for bottom-k and for masks that ignore the scores. The load of a key is the number of queries that
    attend to it.

    [bold]semdiag separation checkpoints/even-pairs-topk-5-seed-153476998[/]
    """,
    takes=("k", "every", *SAMPLING),
    leave_out=(),
    external=False,
    place="theory",
)
