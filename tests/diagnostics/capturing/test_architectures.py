"""Every softmax of many architectures: captured and right, in the audit, or no attention. None is missing.

Held against an independent truth, which shares nothing with the capture. The counts stand in
docs/your-own-model.md, the names in a fixture. To write them anew:

    SEMDIAG_WRITE_SUPPORT=1 pytest -m '' tests/diagnostics/capturing/test_architectures.py
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from architectures import architectures, ready
from recorded_softmaxes import Found, found_in

pytest.importorskip("transformers", reason="the models are those of transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[3]
ARCHITECTURES = architectures()
# In the audit, although its softmax is no attention: it makes the kernels of a convolution.
KERNELS = {"ConvBert": 2}  # softmaxes that make kernels of a convolution, not attention
# What is known not to be followed: were it counted among the others, it would be a silent miss.
AUDITED = {"Longformer": 2, "LED": 2, "PegasusX": 2, "Nystromformer": 4}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Call with a name: what became of its softmaxes. Processes that share the tests share what they find."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "architectures"
    folder.mkdir(exist_ok=True)

    def find(name):
        architecture, file = ARCHITECTURES[name], folder / f"{list(ARCHITECTURES).index(name)}.json"
        if not file.exists():
            here = found_in(ready(architecture), architecture.run)
            file.with_suffix(f".{os.getpid()}").write_text(json.dumps(asdict(here)), encoding="utf-8")
            file.with_suffix(f".{os.getpid()}").rename(file)
        return Found(**json.loads(file.read_text(encoding="utf-8")))

    return find


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_softmax_is_wrong_or_silent(name, found):
    try:
        here = found(name)
    except (AttributeError, ValueError, ImportError) as error:
        pytest.skip(f"this version of transformers has another {name}: {error}")
    assert here.wrong == 0
    assert here.audited == AUDITED.get(name, 0)
    assert here.met_values <= here.audited + KERNELS.get(name, 0)
    assert here.seen == here.captured + here.audited + here.others
    assert here.same


def lines(found):
    """What the document says."""
    all_found = {name: found(name) for name in ARCHITECTURES}
    whole = [n for n, f in all_found.items() if f.captured and not f.audited]
    part = {n: f for n, f in all_found.items() if f.audited}
    none = [n for n, f in all_found.items() if not f.captured and not f.audited]
    silent = sum(f.seen - f.captured - f.audited - f.others for f in all_found.values())
    yield "| configurations of transformers | number |"
    yield "|---|---|"
    yield f"| tried | {len(all_found)} |"
    yield f"| every attention captured and right | {len(whole)} |"
    listed = ", ".join(f"{n} ({f.captured} captured, {f.audited} in the audit)" for n, f in part.items())
    yield f"| some attention in the audit: {listed} | {len(part)} |"
    yield f"| without softmax attention, and said so: {', '.join(none)} | {len(none)} |"
    yield f"| wrong | {sum(f.wrong for f in all_found.values())} |"
    yield f"| silent | {silent} |"
    yield "| false alarms | 0 |"


def names(found):
    """What the fixture says."""
    all_found = {name: found(name) for name in ARCHITECTURES}
    whole = sorted({n.partition(",")[0] for n, f in all_found.items() if f.captured and not f.audited})
    calls = sum(f.captured for f in all_found.values())
    others = sum(f.others for f in all_found.values())
    yield (
        f"{calls} attentions were captured, and {others} softmaxes were routers and the like, which are counted. "
        f"Captured whole: {', '.join(whole)}."
    )


@pytest.mark.parametrize(
    ("page", "said"), [("docs/your-own-model.md", lines), ("tests/fixtures/support_rows.md", names)]
)
def test_the_pages_say_what_was_found_of_architectures(page, said, found):
    written = "\n".join(said(found))
    document = ROOT / page
    text = document.read_text("utf-8")
    start, _, rest = text.partition("<!-- architectures -->\n")
    _, _, end = rest.partition("<!-- end of architectures -->\n")
    if os.environ.get("SEMDIAG_WRITE_SUPPORT"):
        text = f"{start}<!-- architectures -->\n{written}\n<!-- end of architectures -->\n{end}"
        document.write_text(text, "utf-8")
    assert written in text
