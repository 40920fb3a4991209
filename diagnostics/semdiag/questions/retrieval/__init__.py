"""Does a model with real masks still find what it was told long ago?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from semdiag.measuring.plan import Plan
from semdiag.presenting.options import listed_names, option_field, shared_field, whole_numbers
from semdiag.presenting.question import Question, Request

if TYPE_CHECKING:
    import pandas as pd

    from semdiag.measuring.subject import Subject
    from semdiag.measuring.table import Table

TASKS = "passkey", "keys", "variables", "induction"  # described in docs/commands/retrieval.md


_BYTES = 40  # a token of a text, while it is made


@dataclass(frozen=True)
class RetrievalPlan(Plan):
    """Which texts are made, and with which masks the model reads them."""

    name: ClassVar[str] = "retrieval"

    tasks: tuple[str, ...] = option_field(
        ("passkey", "induction"), f"What is to be found, of {', '.join(TASKS)}.",
        metavar="TASK,TASK", read=listed_names,
    )  # fmt: skip
    kinds: tuple[str, ...] = option_field(
        ("topk", "tile-64x64", "window"), "Kinds of sparse attention, of k-sweep or of engines (tile-64x64, "
        "skip-8).", metavar="KIND,KIND", read=listed_names,
    )  # fmt: skip
    ks: tuple[int, ...] = option_field(
        (64, 256), "How many keys each query keeps.", "--k", metavar="K,K", read=whole_numbers,
    )  # fmt: skip
    lengths: tuple[int, ...] = option_field((512, 1024), "Tokens of the texts.", metavar="L,L", read=whole_numbers)
    samples: int = shared_field(8)  # texts for each task, length and depth
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)  # where in the text it is told: 0 at its start, 1 at its end

    def __post_init__(self) -> None:
        from semdiag.questions.k_sweep.budgets import check_kinds
        from semdiag_files import InputError, require_memory, unknown_name

        for task in self.tasks:
            if task not in TASKS:
                raise unknown_name("task of retrieval", task, TASKS)
        check_kinds(self.kinds)
        if not (self.tasks and self.kinds and self.ks and self.lengths and self.depths):
            raise InputError("Retrieval takes at least one task, kind, k, length and depth each.")
        if min(*self.ks, self.samples) < 1 or not all(0 <= depth <= 1 for depth in self.depths):
            raise InputError(f"k and the number of texts are at least 1, depths from 0 to 1. Got {self}.")
        texts = len(self.tasks) * len(self.depths) * self.samples
        require_memory(_BYTES * max(self.lengths) * texts, "The texts that --samples and --lengths ask for")

    @property
    def forwards(self) -> int:
        """Return how many texts are read, at most."""
        masks = 1 + sum(1 if kind.startswith("skip-") else len(self.ks) for kind in self.kinds)
        return masks * len(self.tasks) * len(self.lengths) * len(self.depths) * self.samples

    @classmethod
    def tables(cls) -> "tuple[Table, ...]":
        """Return the tables that it makes."""
        from semdiag.measuring.calls.tile_weights import TILES
        from semdiag.questions.retrieval.measure import RETRIEVAL

        return RETRIEVAL, TILES

    def measure(self, subject: "Subject") -> "Mapping[str, pd.DataFrame]":
        """Measure a model."""
        from semdiag.questions.retrieval.measure import retrieval

        return retrieval(subject, self)

    def provenance(self, samples: int, probe_samples: int) -> dict[str, Any]:
        """Return what to record."""
        return {"retrieval_samples": self.samples, "retrieval_depths": list(self.depths)}


def _ask(*, plan: RetrievalPlan, request: Request) -> None:
    from pathlib import Path

    from semdiag.capturing.inputs import tokeniser_of
    from semdiag.measuring.measurements import Measurements
    from semdiag.measuring.progress import SurveyProgress
    from semdiag.measuring.survey import Inputs, survey
    from semdiag.questions.retrieval.measure import first_text

    def run(loaded: Any, conditions: Any, progress: SurveyProgress) -> Measurements:
        parts = []
        for model in loaded:  # the attention of its first text is measured, too
            if conditions.texts.tokenizer is not None:
                tokeniser_of(Path(model.path), model, conditions.texts)  # which keeps it
            batch = {"input_ids": first_text(model, plan, conditions.seed)}
            inputs = Inputs([batch], None, "made by semdiag", model)
            parts.append(survey([model], conditions, progress, may_move_models=True, inputs=inputs))
        return Measurements.concat(parts)

    conditions = request.conditions(plans=(plan,), samples=1, batch_size=1)
    request.deliver(request.measured(request.values["models"], conditions, run)[0])


QUESTION = Question(
    "retrieval",
    __name__,
    """Ask whether a model with real masks still finds a fact that stands far back in its text.

    Texts are made from the model's own tokenizer, by the seed: nothing is downloaded. An answer is right if each
    of its tokens is the likeliest after those before it. First the model answers as it is; where it is right in
    less than half of the texts, masks are not judged. For each task, length and depth, --samples texts are made.

    [bold]semdiag retrieval hf:PATH --kinds window,topk,tile-64x64-quest --k 64,256 --lengths 1024[/]
    """,
    RetrievalPlan,
    ask=_ask,
    takes=("models", "tokenizer"),
    leave_out=("inputs", "labels", "min_keys", "per_query", "jobs", "ray", "config", "batch_size", "head"),
    defaults={"samples": 8},
    needs=("retrieval",),
    place="screen",
    leads=2,
)
