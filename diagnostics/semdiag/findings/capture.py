"""How much of a model's attention was seen."""

from semdiag.findings.strict_json import Summary
from semdiag.measurement.measurements import Measurements


def capture_summary(own: Measurements) -> Summary:
    """How much of a model's attention was seen: modules found and captured, residual, what was skipped and why.

    Args:
        own: measurements of one model.
    """
    row = own.models.iloc[0]
    found, captured = int(row["attention_found"]), int(row["attention_captured"])
    listed = {name: getattr(own, name).drop(columns="model").to_dict("records") for name in ("skipped", "remarks")}
    return {"found": found, "captured": captured, "residual": float(row["residual"]), **listed}
