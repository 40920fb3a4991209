"""A small causal language model, trained on the spot: ``semdiag k-sweep docs.causal_model:build --rerun``.

Letters of the 300 sentences of ``tests/fixtures/english_sentences.txt``, two of three for training: three blocks,
four heads, 96 letters of context. A minute on one core of a CPU; then 1.2 nats a letter on the other sentences.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

TEXT = Path(__file__).parents[1] / "tests" / "fixtures" / "english_sentences.txt"
LENGTH, WIDTH, HEADS, BLOCKS, STEPS = 96, 64, 4, 3, 600


class Block(nn.Module):
    """Causal attention and an MLP, after their normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, d) -> (B, L, d)."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(x)


class Letters(nn.Module):
    """Letters to the logits of the next letter."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(B, L) -> (B, L, letters)."""
        return self.head(self.blocks(self.letters(ids) + self.places.weight[: ids.shape[1]]))


def build(steps: int = STEPS) -> tuple[nn.Module, list[torch.Tensor]]:
    """Train the model.

    Args:
        steps: of training; 0 leaves it untrained.

    Returns:
        The model, and windows of the sentences that it was not trained on.
    """
    text = TEXT.read_text(encoding="utf-8")
    index = {letter: at for at, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([index[letter] for letter in text])
    train, rest = ids[: 2 * len(ids) // 3], ids[2 * len(ids) // 3 :]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Letters(len(index))
        optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(steps):
            starts = torch.randint(len(train) - LENGTH, (32, 1))
            windows = train[starts + torch.arange(LENGTH + 1)]
            loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    windows = rest[: len(rest) // LENGTH * LENGTH].view(-1, LENGTH)
    return model.eval(), list(windows.split(50))


def untrained() -> tuple[nn.Module, list[torch.Tensor]]:
    """The same model with its initial weights."""
    return build(0)
