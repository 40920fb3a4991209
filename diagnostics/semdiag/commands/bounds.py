"""``semdiag bounds``."""

from pathlib import Path
from typing import Annotated

import typer

from semdiag.commands import options
from semdiag.commands.shared import Shared, with_options


@with_options(dtype="float64")
def bounds(
    models: options.Models = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Compare every model with this one. Default: full models with their counterparts of the "
            "same task, seed, size and snapshot.",
            rich_help_panel="What is measured",
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Compute the Lipschitz bounds of Theorems 2, 4 and 5 and the conditions of Corollary 1, in both forms.

    Norms, every block's and every parameter tensor's constant (paper and sound), measured slopes of the
    loss beside them, and for every pair whether the mask has the better guarantee. The bounds speak about the
    evaluated inputs (100 of them) and this checkpoint.

    [bold]semdiag bounds checkpoints/even-pairs-topk-5-seed-153476998 --against
    checkpoints/even-pairs-full-seed-153476998[/]
    """
    from semdiag.commands.printing.theory import print_bounds
    from semdiag.measurement.probes.bounds.probe import BoundsPlan

    conditions = shared.conditions(
        plans=(BoundsPlan(),),
        encoders_only=True,
    )
    if against is None:
        findings = shared.measured(models, conditions)
    else:
        paths = _with_reference(models, against)
        findings = shared.measured(paths, conditions)
        findings.measurements.provenance["against"] = str(paths[-1])
    shared.deliver("bounds", findings, print_bounds)


def _with_reference(models: list[Path] | None, against: Path) -> list[Path]:
    """The checkpoints to measure, the reference last.

    Raises:
        InputError: if the reference is not one checkpoint, or there is nothing to compare with it.
    """
    from semdiag.capturing.discovery import find_checkpoints
    from semdiag_models import InputError

    reference = find_checkpoints([against])
    if len(reference) != 1:
        raise InputError(f"--against takes one checkpoint. {against} holds {len(reference)}.")
    paths = [path for path in find_checkpoints(models) if path.resolve() != reference[0].resolve()]
    if not paths:
        raise InputError(f"There is nothing to compare: name a model besides --against {against}.")
    return [*paths, *reference]
