"""Which k were asked of full-attention models."""

import pandas as pd


def counterfactual_ks(queries: pd.DataFrame) -> list[int]:
    """Numbers of heavy hitters for which a model's table has counterfactual columns."""
    prefix = "dispersion_k"
    named = [str(column) for column in queries if str(column).startswith(prefix)]
    return [int(name.removeprefix(prefix)) for name in named if queries[name].notna().any()]
