"""Do masks survive input noise? Every query's set S against that of noisy copies of the same input."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from semdiag.capturing.attention_calls import AttentionCall
from semdiag.capturing.batches import Batch, moved, repeated, samples_of, split
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.censored import predicted_classes
from semdiag.mathematics.mask_stability import predicted_agreement
from semdiag.measuring.calls.running import running, unnamed
from semdiag.measuring.embedding_noise import Reach, noisy_embeddings
from semdiag.measuring.subject import Subject
from semdiag.measuring.table import Table, columns_of
from semdiag.questions.mask_stability import NoisePlan
from semdiag.questions.mask_stability.mask_rows import RowChanges, Selection, row_changes, selection_of
from semdiag.questions.stability.measure import noise_of_samples, noisy_copies, small_parts, token_size

MASKS = Table(
    "masks",
    "One row per noise level and query that drops a key.",
    columns_of(
        "model str; level float64; sample layer head query kept draws int32; separation float64; agreement exact "
        "certified float32; certified_changed int32; predicted swing_sd response float32"
    ),
)
NOISE_EFFECTS = Table(
    "noise_effects",
    "One row per noise level and sample: what the noise does to the output.",
    columns_of(
        "model str; level float64; sample int32; logit_change flipped correct_before correct_after float64"
    ),
)


class _MaskSums:
    """Sums over the draws of changes of masks, layer by layer."""

    def __init__(self) -> None:
        self._rows: dict[int, list[dict[str, Tensor]]] = {}  # by layer, one entry per batch
        self._swings: dict[int, Tensor] = {}  # by layer: (3, levels, heads) count, Σ, Σ²

    def add(self, layer: int, changes: RowChanges) -> None:
        row = {name: getattr(changes, name) for name in ("counted", "separation", "response", "set_size")}
        counts = {
            "agreement": changes.common, "changed": changes.changed, "certified": changes.certified,
            "certified_changed": changes.changed & changes.certified,
        }  # fmt: skip
        row |= {name: values.sum(0, dtype=torch.int32) for name, values in counts.items()}
        self._rows.setdefault(layer, []).append(row)
        swing = changes.swing.where(changes.counted, 0.0).double()
        count = (swing.shape[0] * changes.counted.sum((0, 2))).expand(swing.shape[1], -1).double()
        sums = torch.stack([count, swing.sum((0, 2, 4)), swing.square_().sum((0, 2, 4))])
        self._swings[layer] = self._swings[layer] + sums if layer in self._swings else sums

    def leave_out(self, layers: Collection[int]) -> None:
        for layer in layers:
            del self._rows[layer]

    def table(self, model: str, levels: Sequence[float], draws: int) -> pd.DataFrame:
        parts = []
        for layer, batches in sorted(self._rows.items()):
            most = max(b["counted"].shape[-1] for b in batches)  # rows that pad a shorter batch do not count
            joined = {
                name: torch.cat([F.pad(b[name], (0, most - b[name].shape[-1])) for b in batches], -3).cpu()
                for name in batches[0]
            }
            count, total, squares = self._swings[layer].cpu()
            spread = (squares / count - (total / count).square()).clamp(min=0).sqrt()  # (levels, heads)
            counted = joined["counted"]
            sample, head, query = (where.to(torch.int32).numpy() for where in counted.nonzero(as_tuple=True))
            separation = joined["separation"][counted].double()
            set_size = joined["set_size"][counted]
            for at, level in enumerate(levels):
                sums = {name: values[at][counted].double() for name, values in joined.items() if values.ndim == 4}
                sd = spread[at][torch.from_numpy(head).long()]
                columns = {
                    "sample": sample, "layer": np.int32(layer), "head": head, "query": query, "level": level,
                    "kept": set_size.to(torch.int32), "draws": np.int32(draws), "separation": separation,
                    "agreement": sums["agreement"] / (draws * set_size), "exact": 1 - sums["changed"] / draws,
                    "certified": sums["certified"] / draws, "certified_changed": sums["certified_changed"],
                    "predicted": predicted_agreement(separation, sd), "swing_sd": sd, "response": sums["response"],
                }  # fmt: skip
                parts.append(pd.DataFrame({"model": model, **columns}))
        return MASKS.of_parts(parts)


def _effects_table(
    model: str, outputs: Sequence[Mapping[str, Tensor]], levels: Sequence[float], labels: Tensor | None
) -> pd.DataFrame:
    if not outputs:
        return NOISE_EFFECTS.empty()
    change, flipped, before, after = (torch.cat([part[name] for part in outputs], -1) for name in outputs[0])
    count = len(before)
    truth = torch.full((count,), torch.nan) if labels is None else labels[:count].cpu().double()
    labelled = 1.0 if labels is not None else float("nan")
    parts = []
    for at, level in enumerate(levels):
        columns = {
            "level": level, "sample": np.arange(count, dtype=np.int32), "logit_change": change[at],
            "flipped": flipped[at], "correct_before": (before == truth).double() * labelled,
            "correct_after": (after[:, at] == truth).double().mean(0) * labelled,
        }  # fmt: skip
        parts.append(pd.DataFrame({"model": model, **columns}))
    return NOISE_EFFECTS.of_parts(parts)


def noise_tables(
    model: LoadedModel | nn.Module,
    tokens: Batch | Iterable[Batch],
    labels: Tensor | None = None,
    plan: NoisePlan | None = None,
    *,
    batch_size: int = 100,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    min_keys: int = 1,
    after_batch: Callable[[int], None] = lambda samples: None,
    note: Callable[[str, str, str], None] = lambda name, why, where: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare the mask of every query with the masks of noisy copies of the same input."""
    plan = NoisePlan.checked(plan)
    loaded = unnamed(model)
    copies = 1 + len(plan.levels) * plan.draws
    kind = "full" if loaded.external else loaded.encoder.config.attention
    probe = _Probe(plan, selection_of(kind), min_keys)
    reach = Reach()

    def add(call: AttentionCall) -> None:
        probe.add(call)
        if loaded.external:
            reach.look(call, probe.samples)

    with running(loaded, add, device, dtype) as run:
        for batch in split(tokens, max(1, round(batch_size / copies))):
            probe.samples = samples_of(batch)
            noisy = moved(repeated(batch, copies), run.device, run.dtype)
            if loaded.external:
                with noisy_embeddings(run.module, noisy, probe.samples, probe.add_noise):
                    run(noisy)
                run.alike()
            else:
                with noisy_copies(run.module.get_submodule("blocks.0"), probe.samples, probe.add_noise):
                    probe.compare(run(noisy))
            after_batch(probe.samples)
    probe.sums.leave_out(reach.left_out(NoisePlan.name, note))
    masks = probe.sums.table(loaded.path, plan.levels, plan.draws)
    return masks, _effects_table(loaded.path, probe.outputs, plan.levels, labels)


@dataclass
class _Probe:
    """Adds noise to the copies of inputs, and sums over its draws how masks and outputs change."""

    plan: NoisePlan
    selection: Selection | None
    min_keys: int
    samples: int = 0
    sums: _MaskSums = field(default_factory=_MaskSums)
    outputs: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seeds = torch.Generator().manual_seed(self.plan.seed)
        self.generators: list[list[torch.Generator]] = []  # by place, one for each draw

    def add_noise(self, copies: Tensor, place: int = 0) -> None:
        """Add noise to copies (D·N·b, L, d) of b inputs; levels differ in its size alone."""
        if place == len(self.generators):
            seeds = torch.randint(2**62, (self.plan.draws,), generator=self.seeds)
            self.generators.append([torch.Generator().manual_seed(int(seed)) for seed in seeds])
        copies = copies.view(self.plan.draws, -1, self.samples, *copies.shape[1:])
        size = token_size(copies[0, 0])
        for draw, generator in enumerate(self.generators[place]):
            noise = noise_of_samples(copies.shape[2:], generator, copies.dtype).to(copies.device) * size
            for at, level in enumerate(self.plan.levels):
                copies[draw, at].add_(noise, alpha=level)

    def add(self, call: AttentionCall) -> None:
        if self.selection is None:
            return
        draws = self.plan.draws
        levels = len(self.plan.levels)
        changes = row_changes(call, self.samples, draws, levels, self.plan.k, self.selection)
        self.sums.add(call.layer, replace(changes, counted=changes.counted & (changes.keys >= self.min_keys)))

    def compare(self, logits: Tensor) -> None:
        """Keep the effect of the noise on outputs, (levels, b), and clean predictions (b,)."""
        clean = logits[: self.samples].double()
        noisy = logits[self.samples :].view(self.plan.draws, -1, *clean.shape).double()
        before = predicted_classes(clean)
        after = predicted_classes(noisy)
        effects = {
            "change": ((noisy - clean).norm(dim=-1) / clean.norm(dim=-1)).mean(0),
            "flipped": (after != before).double().mean(0), "before": before, "after": after,
        }  # fmt: skip
        self.outputs.append({name: values.cpu() for name, values in effects.items()})


def measure_mask_stability(subject: Subject, plan: NoisePlan) -> Mapping[str, pd.DataFrame]:
    """Return the tables of a plan."""
    inputs, labels = subject.first
    if subject.model.external:  # a batch with all its noisy copies is as large as any other
        largest = max(map(samples_of, inputs))
        size = max(1, min(subject.batch_size, largest) // (1 + len(plan.levels) * plan.draws))
        inputs = [piece for batch in inputs for piece in small_parts(batch, size)]
    masks, effects = noise_tables(
        subject.model,
        inputs,
        labels,
        plan,
        batch_size=subject.batch_size,
        device=subject.device,
        dtype=subject.dtype,
        min_keys=subject.min_keys,
        note=subject.note,
    )
    return {"masks": masks, "noise_effects": effects}
