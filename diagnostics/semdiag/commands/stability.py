"""``semdiag stability``."""

from semdiag.commands import options


def stability(
    models: options.Models = None,
    noise: options.Noise = "0.01",
    inputs: options.Inputs = None,
    samples: options.Samples = 500,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    dtype: options.Dtype = "float64",
    seed: options.Seed = 0,
    min_keys: options.MinKeys = 1,
    config: options.Config = None,
    out: options.Out = None,
    as_json: options.Json = False,
    figures: options.Figures = "png,svg",
    quiet: options.Quiet = False,
) -> None:
    """Measure how much attention weights move when scores move, beside the paper's and the sound bound.

    ξ bounds ‖p − p'‖₁ by ξ ‖z − z'‖₁ (paper, Theorem 5). Given per layer and head: the local constant,
    measured secants under input noise (50 samples), the response (mean change), ξ in both forms, and
    verdicts.

    [bold]semdiag stability checkpoints/even-pairs-topk-5-seed-153476998 --noise 0.01[/]
    """
    from semdiag.commands import measuring, theory_printing
    from semdiag.measurement.survey import Conditions

    conditions = Conditions(
        inputs=inputs,
        samples=samples,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        min_keys=min_keys,
        config=measuring.read_config(config),
        noise=measuring.positive_numbers(noise, "--noise"),
    )
    formats = measuring.figure_formats(figures)
    findings = measuring.measured(models, conditions, quiet)
    measuring.deliver(
        "stability", findings, theory_printing.print_stability,
        out=out, formats=formats, as_json=as_json, quiet=quiet,
    )  # fmt: skip
