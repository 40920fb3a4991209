"""``semdiag check``."""

import typer

from semdiag.commands import options


def check(
    models: options.Models = None,
    inputs: options.Inputs = None,
    samples: options.Samples = 500,
    batch_size: options.BatchSize = 100,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check that top-k attention has the smaller dispersion: δ_h < δ_s.

    Pairs full and top-k checkpoints by task, seed, size and snapshot, and compares the pooled dispersions at
    p50, p75, p90 and p95; the maximum is shown, not judged. Exit code 0: every pair passes; 1: one fails;
    2: nothing to pair, or a partner is missing. Made for CI.

    [bold]semdiag check[/]
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from semdiag.commands.measuring import measured
    from semdiag.measurement.gate import GATED, SHOWN, dispersion_gate
    from semdiag.measurement.strict_json import json_ready
    from semdiag.measurement.survey import Conditions

    conditions = Conditions(inputs=inputs, samples=samples, batch_size=batch_size, device=device, dtype=dtype)
    measurements = measured(models, conditions, quiet)
    results = dispersion_gate(measurements)
    if not quiet:
        for result in results:
            table = Table("nats", *SHOWN, title=result.pair.label, title_justify="left")
            table.add_row("δ_s, full", *(f"{result.full[p]:.4g}" for p in SHOWN))
            table.add_row("δ_h, top-k", *(f"{result.topk[p]:.4g}" for p in SHOWN))
            verdicts = ("–" if p not in GATED else "FAILS" if p in result.failed else "holds" for p in SHOWN)
            table.add_row("δ_h < δ_s", *verdicts)
            Console(stderr=True).print(table)
    failed = [result for result in results if not result.passed]
    if as_json:
        rows = [
            {
                "full": r.pair.full,
                "topk": r.pair.other,
                "delta_s": r.full,
                "delta_h": r.topk,
                "passed": r.passed,
            }
            for r in results
        ]
        content = {
            "schema": "semdiag.check/1",
            "provenance": measurements.provenance,
            "gated": GATED,
            "results": rows,
        }
        typer.echo(json.dumps(json_ready(content), allow_nan=False))
    for result in failed:
        typer.echo(f"semdiag: {result.pair.label}: δ_h < δ_s fails at {', '.join(result.failed)}.", err=True)
    if not quiet:
        typer.echo(f"{len(results) - len(failed)} of {len(results)} pairs pass.", err=True)
    if failed:
        raise typer.Exit(1)
