"""A loaded model on one input."""

from semdiag.capturing.loading import LoadedModel
from semdiag.measuring.calls.running import placed
from semdiag.measuring.conditions import DTYPES, Conditions
from semdiag.questions.look.measure.heads import Seen, see
from semdiag.questions.look.measure.sample import read_sample
from semdiag_models import Encoder
from semdiag_models.device import find_device, with_float64


def see_loaded(model: LoadedModel, conditions: Conditions, text: str | None = None) -> Seen:
    """Run a model on its one input."""
    device = find_device(conditions.device)
    conditions = conditions.decided([model], device)
    if conditions.dtype == "float64":
        device = with_float64(device)
    if isinstance(model.module, Encoder):
        model.module.with_draws(conditions.seed)
    sample = read_sample(model, conditions, text)
    if model.external:
        placed(model.module, device, DTYPES[conditions.dtype])  # in place: a copy may not fit into memory
    return see(model, sample, device, DTYPES[conditions.dtype], conditions.seed)
