"""``semdiag separation``."""

from semdiag.commands.metric_command import metric_command

separation = metric_command(
    "separation",
    """Measure semantic separation Δ and key load: how clear-cut the mask is.

    Δ is the smallest kept score minus the largest dropped one (paper, Def. 3): the larger, the more a query's
    input may change before its mask does. Undefined for full attention, which drops nothing; can be negative
    for masks that ignore the scores and for bottom-k. The key load counts the queries that attend to a key.

    [bold]semdiag separation checkpoints/even-pairs-topk-5-seed-153476998[/]
    """,
)
