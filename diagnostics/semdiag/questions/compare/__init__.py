"""What did fine-tuning, quantising or pruning change of a model's attention?"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from semdiag.measuring.plan import Plan
from semdiag.presenting import options
from semdiag.presenting.options import command_option, option_field
from semdiag.presenting.question import YOUR_MODEL, Question, Request

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from semdiag.capturing.loading import LoadedModel
    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table


@dataclass(frozen=True)
class ComparePlan(Plan):
    """What a model is compared with."""

    name: ClassVar[str] = "compare"

    top: int = option_field(8, "k of the top-k keys whose overlap is shown.")
    base: "LoadedModel | None" = None  # None: the model itself, where nothing changes
    dtype: "torch.dtype | None" = None  # number format of the base; None: that of the model

    def __post_init__(self) -> None:
        from semdiag_files import InputError

        if self.top < 1:
            raise InputError(f"--top must be at least 1. Got {self.top}.")

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.questions.compare.measure import COMPARED, COMPARED_OUTPUTS

        return COMPARED, COMPARED_OUTPUTS

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.compare.measure import measure_comparison

        return measure_comparison(subject, self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        base = {} if self.base is None else {"base": self.base.path}
        return {"compare_top": self.top, **base}


def _model(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=options.models)


def _ask(
    base: Annotated[Path, _model("A", "The base: any model that other commands take.")],
    model: Annotated[
        Path | None,
        _model(
            "[B]",
            "The model that was made of it: fine-tuned, quantised, pruned. Default: A itself, for another "
            "--dtype-b.",
        ),
    ] = None,
    dtype_b: Annotated[
        str | None,
        command_option(
            "Precision in which B runs, as of --dtype. Default: that of A.",
            metavar="NAME",
            show_default=False,
            rare=True,
        ),
    ] = None,
    *,
    plan: ComparePlan,
    request: Request,
) -> None:
    from semdiag.capturing.loading import find_checkpoints
    from semdiag.questions.compare.measure import compare_survey
    from semdiag_files import InputError

    for path in filter(None, (base, model)):
        if len(checkpoints := find_checkpoints([path])) > 1:
            raise InputError(
                f"semdiag compare takes two models, and {path} holds {len(checkpoints)} runs. Name one."
            )
    alone = model is None or find_checkpoints([base])[0].resolve() == find_checkpoints([model])[0].resolve()
    if alone and dtype_b is None:
        raise InputError(
            "There is nothing to compare: name a second model, or another precision of this one with --dtype-b."
        )
    measure = partial(compare_survey, top=plan.top, dtype=dtype_b)
    # Four stages: one sample of both, each of them alone, both together.
    models, against, stages = ([base], None, 3) if alone or model is None else ([model], base, 1)
    findings, _ = request.measured(models, request.conditions(), measure, more_stages=stages, against=against)
    request.deliver(findings)


QUESTION = Question(
    "compare",
    __name__,
    """Compare two models on the same inputs: what did fine-tuning, quantising or pruning change?

    For every layer and head: the total variation of the attention weights, the change of δ, the overlap of the
    top-k, and the change of the attention's output, parted into that of the weights and that of the values. Of the
    model's outputs: the divergence KL(A || B), changed predictions, the loss. The heads that changed most come
    first.

    [bold]semdiag compare hf:models/base hf:models/four-bits --inputs texts.txt[/]
    """,
    ComparePlan,
    _ask,
    takes=("every",),
    leave_out=("min_keys", "per_query", "jobs", "ray"),
    defaults={"batch_size": 8},
    needs=("compared",),
    panel=YOUR_MODEL,
    pictured=True,
)
