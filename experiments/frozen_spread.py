"""The secondary analysis of frozen.md: spread of the attention outputs at the initialisation, and frozen learning.

    python experiments/frozen_spread.py --out reports/frozen

The spread follows from the configuration alone (a second or two each, 175 initialisations). Tasks with missing
runs are left out.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from frozen import HERE, RUN, expected_runs, missing_runs, read_outcomes
from predictors import candidates_at
from read_speed import initialisation

from semdiag.measuring.measure import Conditions

SPREAD = "output_spread"


def spreads(tasks: list[str]) -> pd.DataFrame:
    """ln of the mean spread of attention outputs across queries, of every frozen run of these tasks."""
    rows = []
    for run, names in expected_runs().items():
        if names[0] in tasks and run.training.frozen:
            value = candidates_at(initialisation(run), Conditions(), (SPREAD,))[SPREAD]
            rows.append((*names, value))
    return pd.DataFrame(rows, columns=[*RUN, "ln_spread"])


def by_family(outcomes: pd.DataFrame, spread: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds and the two attentions of each family, of the frozen runs; one row per task and family.

    ``opposite`` says whether the three families of the task stand in opposite orders: the larger the spread, the
    smaller the loss area.
    """
    both = spread.merge(outcomes, on=RUN, validate="one_to_one")
    both["family"] = both["attention"].str.split("-").str[0]
    means = both.groupby(["task", "family"], sort=False)[["ln_spread", "loss_area"]].mean().reset_index()
    ranks = means.groupby("task")[["ln_spread", "loss_area"]].rank()
    reversed_ranks = (
        ranks["ln_spread"] + ranks["loss_area"] == means.groupby("task")["family"].transform("size") + 1
    )
    return means.assign(opposite=reversed_ranks.groupby(means["task"]).transform("all"))


def main() -> None:
    """Measure and compare the complete tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=HERE / "frozen", help="folder of semdiag sweep --records")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = read_outcomes(chosen.records)
    missing = missing_runs(outcomes)
    print(f"{sum(missing.values())} of {len(expected_runs())} runs are missing.")
    complete = [task for task, count in missing.items() if not count]
    if not complete:
        return
    measured = spreads(complete)
    families = by_family(outcomes, measured)
    print(families.to_string(index=False, float_format="%.3f"))
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        for name, table in (("spread", measured), ("families", families)):
            table.to_csv(chosen.out / f"{name}.csv", index=False, float_format="%.9g")


if __name__ == "__main__":
    main()
