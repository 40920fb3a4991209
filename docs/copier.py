"""A model that finds whatever it was told, and its tokenizer: an example of pages in docs/commands.

It attends to the keys that stand behind the same three tokens as the query's, and predicts their token.
"""

import shutil
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

WORDS = (
    "The pass key is What phone room bus number of the red blue green white door Which opens VAR A B C D W X Y Z "
    "It in at near on before after night river lunch storm old town spring Monday farmer teacher captain baker "
    "doctor painter driver singer judge pilot saw found carried repaired sold painted forgot cleaned described "
    "bought bridge lamp garden boat letter clock window basket piano table horse map . ? : = 0 1 2 3 4 5 6 7 8 9"
)


def tokenizer(words: str = WORDS) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word and each digit."""
    known = {word: place for place, word in enumerate(["<unk>", *dict.fromkeys(words.split())])}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "<unk>"))
    split = tokenizers.pre_tokenizers
    own.pre_tokenizer = split.Sequence([split.Whitespace(), split.Digits(individual_digits=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>")


class Copier(nn.Module):
    """One head of attention with queries and keys made of the tokens."""

    def __init__(self, words: int, sharp: float = 30.0) -> None:
        super().__init__()
        self.one_hot = nn.Embedding.from_pretrained(torch.eye(words))
        self.sharp = nn.Parameter(torch.tensor(sharp))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the logits of the next token."""
        one = self.one_hot(input_ids)
        first, second, third = (F.pad(one, (0, 0, n, 0))[:, : one.shape[1]] for n in (1, 2, 3))
        q, k = torch.cat([one, first, second], -1), torch.cat([first, second, third], -1)
        q, k, v = (x[:, None] for x in (q * self.sharp, k, one))
        return {"logits": F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[:, 0]}


def build() -> nn.Module:
    """Return the model."""
    return Copier(len(tokenizer()))


def texts(number: int = 24, length: int = 64) -> Tensor:
    """Return texts of random words, whose second half is the first one again: (number, 2 * length)."""
    draws = torch.Generator().manual_seed(0)
    return torch.randint(1, len(tokenizer()), (number, length), generator=draws).repeat(1, 2)


if __name__ in ("__main__", "<run_path>"):
    np.save("told.npy", texts().numpy())
    tokenizer().save_pretrained("words")
    if not Path("copier.py").exists():
        shutil.copy(__file__, "copier.py")
