"""What all tests share."""

import gc
import html
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from semdiag_models import train as device
from semdiag_models.train import find_device

pytest_plugins = ["measurements_by_hand"]
_NO_CASE = SimpleNamespace(params=())
collect_ignore = ["fuzz_limits.py", "hostile"]  # a script and its parts, which test_fuzz_limits.py runs

# Tiny tensors: a second thread costs more than it gives. .ci/run asks for two to see that no result hangs on it.
torch.set_num_threads(int(os.environ.get("SEMDIAG_TEST_THREADS", "1")))

os.environ.setdefault("SOURCE_DATE_EPOCH", "1764000000")  # no report depends on the day on which tests run

if os.environ.get("SEMDIAG_SECOND_DEVICE"):
    import second_device

    second_device.make_second_device()
    if os.environ["SEMDIAG_SECOND_DEVICE"] == "auto":  # and whatever chooses a device takes it
        device.BEST = (second_device.NAME, *device.BEST)

# By default every run draws the same examples. --hypothesis-profile=random draws others, and nightly more of them;
# with --hypothesis-seed=N, which .ci/run prints, they can be drawn again.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None, database=None, print_blob=True)
settings.register_profile("nightly", settings.get_profile("random"), max_examples=300)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(config, items):
    """By day leave out what is nightly, and of products of three parameters all but cases that hold every pair.

    Of all products the cases that hold every value come first; the others are slow.
    """
    if os.environ.get("SEMDIAG_EVERY_CASE"):
        return
    functions = {}
    for item in items:
        if len(getattr(item, "callspec", _NO_CASE).params) > 1:
            functions.setdefault((item.path, item.parent, item.originalname), []).append(item)
    dropped = {item for item in items if item.get_closest_marker("nightly")}
    for cases in functions.values():
        pairs = covering(cases, 2)
        dropped |= {*cases} - {*pairs}
        for item in {*pairs} - {*covering(cases, 1)}:
            item.add_marker("slow")
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish():
    """Spare the garbage collector the modules and ten thousand tests, which stay to the end."""
    gc.collect()
    gc.freeze()


def covering(cases, together):
    """Return cases, first come first, that hold every combination of so many parameters' values in them all."""
    seen, chosen = set(), []
    for item in cases:
        values = sorted((name, id(value)) for name, value in item.callspec.params.items())
        if new := set(itertools.combinations(values, together)) - seen:
            seen |= new
            chosen.append(item)
    return chosen


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


_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--allow-file-access-from-files", "--virtual-time-budget=8000", "--window-size=1400,2200", "--dump-dom",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium():
    """The browser's program."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("SEMDIAG_REQUIRE_BROWSER") == "1":
            pytest.fail("SEMDIAG_REQUIRE_BROWSER=1, but no chromium is on the PATH: apt-get install chromium")
        pytest.skip("no chromium on the PATH; SEMDIAG_REQUIRE_BROWSER=1 makes this a failure")
    return found


@pytest.fixture(scope="session")
def in_browser(chromium, tmp_path_factory):
    """Call with a folder and a page beside its own: what the page leaves as JSON in <pre id="found">."""
    profile = tmp_path_factory.mktemp("profile")

    def run(folder, probe):
        place = folder / "probe.html"
        place.write_text(probe, encoding="utf-8")
        command = [chromium, *_FLAGS, f"--user-data-dir={profile}", place.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
        assert found, f"The browser ended with {done.returncode}: {done.stderr[-2000:]}"
        return json.loads(html.unescape(found[1]))

    return run
