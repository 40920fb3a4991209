"""``semdiag mask-stability``."""

from typing import Annotated

import typer

from semdiag.commands import options

_NOISE = "Which noise"


def mask_stability(
    models: options.Models = None,
    noise: Annotated[
        str,
        typer.Option(
            help="Standard deviation of the Gaussian noise, relative to each token's root mean square. One level "
            "or several, like 0.01 or 0.001,0.01,0.1.",
            rich_help_panel=_NOISE,
        ),
    ] = "0.001,0.01,0.1",
    draws: Annotated[int, typer.Option(help="Noisy copies of each input and level.", rich_help_panel=_NOISE)] = 5,
    absolute: Annotated[
        bool, typer.Option("--absolute", help="The levels of --noise are absolute.", rich_help_panel=_NOISE)
    ] = False,
    at_block: Annotated[
        int,
        typer.Option(
            help="Block at whose input the noise enters; what is below stays clean. 0: the embedded tokens.",
            rich_help_panel=_NOISE,
        ),
    ] = 0,
    k: Annotated[
        int,
        typer.Option(
            help="Full-attention models have no mask: judge the one that top-k would choose, with this k.",
            rich_help_panel="What is measured",
        ),
    ] = 5,
    inputs: options.Inputs = None,
    samples: options.Samples = 500,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    min_keys: options.MinKeys = 1,
    config: options.Config = None,
    out: options.Out = None,
    as_json: options.Json = False,
    figures: options.Figures = "png,svg",
    quiet: options.Quiet = False,
) -> None:
    """Tell whether attention masks survive a little input noise: certified, predicted, observed.

    For each query the set S of kept keys is compared with the sets S' of noisy copies of the same input.
    Certified: the change of the scores is provably too small to change S. Predicted: the chance that the
    two keys at the boundary do not swap. Masks that do not depend on the input cannot change.

    [bold]semdiag mask-stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.commands import mask_printing, measuring
    from semdiag.measurement.mask_stability import NoisePlan
    from semdiag.measurement.mask_summaries import mask_summary
    from semdiag.measurement.survey import Conditions

    levels = measuring.positive_numbers(noise, "--noise")
    conditions = Conditions(
        inputs=inputs,
        samples=samples,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        min_keys=min_keys,
        config=measuring.read_config(config),
        masks=NoisePlan(levels, draws, absolute, at_block, k, seed),
    )
    formats = measuring.figure_formats(figures)
    found = measuring.measured(models, conditions, quiet)
    measuring.deliver(
        "mask-stability", found, mask_summary(found), mask_printing.print_masks,
        out=out, formats=formats, as_json=as_json, quiet=quiet,
    )  # fmt: skip
