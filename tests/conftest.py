"""What all tests share."""

import random

import pytest
import torch

# Tiny tensors: a second thread costs more than it gives, and results depend on the thread count.
torch.set_num_threads(1)

_LIVES = {
    "fox": "hides in the wood",
    "crab": "sleeps under a stone",
    "owl": "sits on the barn",
    "eel": "swims home",
}
_LOOKS = ("small", "old", "grey", "quick", "hungry", "sleepy")
_TIMES = ("at dawn", "in the rain", "when the moon is up", "all day long")


@pytest.fixture(scope="session")
def story(tmp_path_factory):
    """A text of 300 lines from a small grammar: what an animal does follows from which animal it is."""
    draw = random.Random(7)
    lines = []
    for _ in range(300):
        looks = " ".join(draw.sample(_LOOKS, draw.randint(0, 3)))
        animal = draw.choice(list(_LIVES))
        lines.append(" ".join(f"the {looks} {animal} {_LIVES[animal]} {draw.choice(_TIMES)} .".split()))
    file = tmp_path_factory.mktemp("text") / "story.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
