"""How often ``check_selection`` calls right and wrong choices of keys what they are.

    python benchmarks/selection_rates.py

Rows of 256 keys, k = 32, 100,000 rows of each kind and format, about three minutes on one core. An engine computes
scores in float32, rounds them to the format, and chooses its k largest. Right choices are that, ties broken at
random. In wrong ones the chosen key with the lowest score is replaced by the best with a strictly lower rounded
score: the smallest fault there is. The checker sees (A) the scores before rounding and the format, (B) the rounded
scores, or (C) q and k, from which it recomputes the scores: only a fault beyond both errors can be told then.
"""

import torch
from torch import Tensor

from semdiag import check_selection

ROWS, KEYS, K, WIDTH, PART = 100_000, 256, 32, 64, 10_000
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RIGHT = {"exact", "legal_tie", "within_rounding", "within_error"}


def choices(engine: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A right choice of the engine's own scores, and one with the smallest fault."""
    shuffled = torch.rand(engine.shape, generator=generator).argsort(-1)  # breaks ties at random
    order = shuffled.gather(-1, engine.gather(-1, shuffled).argsort(dim=-1, descending=True, stable=True))
    right, kth = order[:, :K], engine.gather(-1, order[:, K - 1 : K])
    best_below = engine.masked_fill(engine >= kth, -torch.inf).argmax(-1, keepdim=True)
    return right, torch.cat([right[:, :-1], best_below], -1)


def called_right(rows: dict[str, int], indices: Tensor, **what: object) -> None:
    """Count the classes that the checker gives."""
    for name, count in check_selection(indices=indices, **what).counts.items():  # type: ignore[arg-type]
        rows[name] = rows.get(name, 0) + count


def main() -> None:
    """Print a line for each format and way of judging."""
    print(
        "| format | judged by | right choices called right | wrong choices called wrong | classes of right ones |"
    )
    print("|---" * 5 + "|")
    for name, dtype in FORMATS.items():
        found: dict[tuple[str, str], dict[str, int]] = {}
        generator = torch.Generator().manual_seed(0)
        for _ in range(ROWS // PART):
            q = torch.randn(PART // 100, 100, WIDTH, generator=generator).to(dtype)
            k = torch.randn(PART // 100, KEYS, WIDTH, generator=generator).to(dtype)
            plain = WIDTH**-0.5 * (q.float() @ k.float().mT)
            engine = plain.to(dtype).float()
            right, wrong = (each.unflatten(0, q.shape[:2]) for each in choices(engine.flatten(0, 1), generator))
            ways: dict[str, dict[str, object]] = {
                "A: scores, format": {"scores": plain, "format": name},
                "B: rounded scores": {"scores": engine, "format": name},
                "C: q and k": {"scores": None, "q": q, "k": k, "scale": WIDTH**-0.5, "format": name},
            }
            for way, what in ways.items():
                called_right(found.setdefault((way, "right"), {}), right, **what)
                called_right(found.setdefault((way, "wrong"), {}), wrong, **what)
        for way in ways:
            right_rows, wrong_rows = found[way, "right"], found[way, "wrong"]
            as_right = sum(right_rows.get(each, 0) for each in RIGHT) / sum(right_rows.values())
            as_wrong = 1 - sum(wrong_rows.get(each, 0) for each in RIGHT) / sum(wrong_rows.values())
            classes = ", ".join(f"{count:,} {each}" for each, count in right_rows.items() if count)
            print(f"| {name} | {way} | {as_right:.3%} | {as_wrong:.3%} | {classes} |", flush=True)


if __name__ == "__main__":
    main()
