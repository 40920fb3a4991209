"""What one sample could choose and chose, as a map: queries by keys, tokens by experts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from semdiag.questions.selections.measure.own_rows import Choices

LARGEST = 256  # queries, and keys: more cannot be made out
FORBIDDEN, LEFT_OUT, KEPT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class SampleMap:
    """One selection of one sample."""

    module: str  # that selects
    kind: str  # experts, keys or blocks
    # uint8 (queries, choices) of ``FORBIDDEN``, ``LEFT_OUT`` (available and not chosen) and ``KEPT``
    states: NDArray[np.uint8]
    cut: bool  # whether there are more queries or choices


def sample_map(module: str, choices: Choices) -> SampleMap:
    """Return the map of the first sample, from its first to its last real token; of several heads, the first."""
    rows = slice(0, choices.shape[-1])  # samples come first, then heads, then queries
    states = choices.available[rows].byte() + choices.kept[rows].byte()
    real = choices.real[rows].nonzero()[:, 0]
    inside = slice(int(real[0]), int(real[-1]) + 1) if len(real) else slice(0, 0)
    states = states[inside, inside] if choices.kind == "keys" else states[inside]
    return SampleMap(module, choices.kind, states[:LARGEST, :LARGEST].numpy(), max(states.shape) > LARGEST)
