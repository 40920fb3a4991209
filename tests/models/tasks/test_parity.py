from collections import Counter
from itertools import product

import torch

from semdiag_models.tasks import TASKS


def test_all_strings_are_equally_likely(assert_law):
    tokens, _ = TASKS["parity"].sample(16_000, 4, torch.Generator().manual_seed(0))
    assert_law(Counter(map(tuple, tokens.tolist())), dict.fromkeys(product((0, 1), repeat=4), 1 / 16))


def test_no_single_token_tells_the_label(assert_share):
    tokens, labels = TASKS["parity"].sample(50_000, 40, torch.Generator().manual_seed(1))
    for i in (0, 20, 39):
        assert_share((tokens[:, i] == labels).double().mean(), TASKS["parity"].shortcut[0], 50_000)
