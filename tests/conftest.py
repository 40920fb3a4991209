"""What all tests share."""

import hashlib
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from semdiag_models import products
from semdiag_models.device import find_device

pytest_plugins = ["measurements_by_hand"]

# Tiny tensors: a second thread costs more than it gives. .ci/run asks for two to see that no result hangs on it.
torch.set_num_threads(int(os.environ.get("SEMDIAG_TEST_THREADS", "1")))

# Numba compiles anew only where the file of a kernel changes, not those of the kernels that it calls.
_ROOT = Path(__file__).parents[1]
_KERNELS = b"".join(file.read_bytes() for file in sorted(_ROOT.glob("*/semdiag*/**/*_kernels.py")))
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(_ROOT / ".pytest_cache/numba" / hashlib.sha256(_KERNELS).hexdigest()[:16])
)

os.environ.setdefault("SOURCE_DATE_EPOCH", "1764000000")  # no report depends on the day on which tests run

if os.environ.get("SEMDIAG_SECOND_DEVICE"):
    import second_device

    second_device.make_second_device()

# By default every run draws the same examples. --hypothesis-profile=random draws others, and more of them;
# with --hypothesis-seed=N, which .ci/run prints, they can be drawn again.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("random", max_examples=300, deadline=None, database=None, print_blob=True)
settings.load_profile("same")


@pytest.fixture(scope="session")
def other_device():
    """The name of a device that is not the CPU."""
    if (best := find_device("auto")).type != "cpu":
        return best.type
    if not torch.accelerator.is_available():
        pytest.skip("no device but the CPU; SEMDIAG_SECOND_DEVICE=1 makes one")
    return torch.accelerator.current_accelerator().type


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


@pytest.fixture
def through_onednn(monkeypatch):
    """Large products go through oneDNN, whoever made the processor."""
    if products._LINEAR is None:
        pytest.skip("This torch has no oneDNN.")
    monkeypatch.setattr(products, "_PAYS", True)
