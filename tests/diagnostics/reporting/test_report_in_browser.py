"""The page in headless Chromium: no broken image, nothing wider than the window."""

import shutil

import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.measurements import Measurements
from semdiag.questions import registry
from semdiag.questions.heads import head_cells
from semdiag.reporting.report import write_report

pytestmark = pytest.mark.usefixtures("few_resamples")

# Headless windows are at least 500 pixels wide, a frame can be as narrow as a telephone.
_PROBE = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="index.html" style="border:0;width:{width}px;height:2000px"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").onload = async (event) => {{
  const page = event.target.contentDocument, root = page.documentElement, images = [...page.images];
  await Promise.all(images.map((image) => image.decode().catch(() => null)));
  const outside = [...page.querySelectorAll("body *")].filter((element) =>
    !element.closest(".wide, nav") && element.getBoundingClientRect().right > {width} + 0.5);
  document.getElementById("found").textContent = JSON.stringify({{
    window: root.clientWidth, content: Math.max(root.scrollWidth, page.body.scrollWidth),
    images: images.length, broken: images.filter((image) => !image.naturalWidth).map((image) => image.src),
    shown: images.map((image) => image.currentSrc.split(".").pop()),
    outside: outside.map((element) => element.outerHTML.slice(0, 200)),
  }});
}};
</script>"""


@pytest.fixture(scope="module")
def pages(full_report, model, tmp_path_factory):
    """Folders of a report on everything and of one on models with long names, and the images in each."""
    everything = tmp_path_factory.mktemp("everything")
    shutil.copytree(full_report, everything, dirs_exist_ok=True)
    parts = [model(kind, path=f"runs/{'long-' * 30}{kind}.pt") for kind in ("full", "topk", "banded", "block")]
    long_words = Findings(Measurements.concat(parts))  # neither counterfactuals nor any table of a probe
    page, _ = write_report(long_words, tmp_path_factory.mktemp("long"), "semdiag report " + "x" * 300, ["svg"])
    return [
        (everything, len(registry.figures()) - 1),  # the cost is no image
        (page.parent, 6),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_broken_or_too_wide(in_browser, width, pages):
    for folder, images in pages:
        found = in_browser(folder, _PROBE.format(width=width))
        assert found["window"] == width
        assert found["content"] <= width
        assert found["outside"] == []
        assert found["broken"] == []
        assert found["shown"] == ["svg"] * images


_USE = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="index.html" style="border:0;width:1280px;height:2000px"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").onload = (event) => {
  const page = event.target.contentDocument, rows = () => [...page.querySelector("#models tbody").rows];
  const heads = [...page.querySelectorAll("#models th")];
  const place = heads.findIndex((head) => head.textContent === "δ p50");
  const numbers = () => rows().map((row) => +row.cells[place].textContent);
  const found = {};
  heads[place].querySelector("button").click();
  found.rising = numbers();
  heads[place].querySelector("button").click();
  found.falling = numbers();
  rows()[0].click();
  found.marked = [...page.querySelectorAll("tr.marked")].map((row) => row.dataset.model);
  const filter = page.querySelector("input.filter");
  filter.value = "TOP-K";
  filter.oninput();
  found.left = rows().filter((row) => !row.hidden).length;
  page.querySelector("figure > a").click();
  found.large = page.querySelector("dialog").open;
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


@pytest.mark.slow
def test_tables_sort_and_filter_a_model_is_marked_and_figures_grow(in_browser, pages):
    found = in_browser(pages[0][0], _USE)
    assert found["rising"] == sorted(found["rising"])
    assert found["falling"] == sorted(found["rising"], reverse=True)
    assert len(set(found["rising"])) > 1
    assert len(found["marked"]) == 2  # in both tables of models
    assert len(set(found["marked"])) == 1
    assert found["left"] == 1
    assert found["large"]


@pytest.mark.slow
def test_the_probe_sees_what_is_broken(in_browser, four, tmp_path):
    page, _ = write_report(Findings(four), tmp_path / "r", "x", formats=["png"], sections=["learning"])
    (page.parent / "figures" / "training_curves-narrow.png").write_bytes(b"not a picture")
    wide = '<div style="width:2000px">wide</div></main>'
    page.write_text(page.read_text(encoding="utf-8").replace("</main>", wide), encoding="utf-8")
    found = in_browser(page.parent, _PROBE.format(width=390))
    assert found["content"] > 390
    assert len(found["broken"]) == 1
    assert len(found["outside"]) == 1


_CARD = """<!DOCTYPE html><meta charset="utf-8">
<iframe id="page" src="index.html" style="border:0;width:{width}px;height:2000px"></iframe><pre id="found"></pre>
<script>
document.getElementById("page").onload = (event) => {{
  const frame = event.target.contentWindow, page = event.target.contentDocument;
  const all = (chosen) => [...page.querySelectorAll(chosen)];
  const pressed = (key) => new frame.KeyboardEvent("keydown", {{ key, bubbles: true }});
  const press = (key) => page.activeElement.dispatchEvent(pressed(key));
  const over = (part) => part.dispatchEvent(new frame.PointerEvent("pointerover", {{ bubbles: true }}));
  const said = (part) => part.closest("figure, section").querySelector(".value").textContent;
  const svg = all(".drawn svg").filter((one) => frame.getComputedStyle(one).display !== "none");
  const off = () => all('.drawn [data-kind="topk"].off').length, kinds = all('.drawn [data-kind="topk"]').length;
  const found = {{ shown: svg.length, kinds, off: [off()] }};
  const point = svg[0].querySelector('.point[data-kind="topk"]');
  over(point.querySelector("use, path"));
  found.point = [said(point), point.querySelector("title").textContent];
  const name = svg[0].querySelector('.name[data-kind="topk"]');
  name.dispatchEvent(new frame.MouseEvent("click", {{ bubbles: true }}));
  found.off.push(off());
  name.focus(); press("Enter");
  found.off.push(off());
  const cells = all(".heads a");
  cells[0].focus();
  found.cell = said(cells[0]);
  press("ArrowDown"); press("ArrowRight");
  found.address = page.activeElement.getAttribute("href");
  found.stops = cells.filter((cell) => cell.tabIndex === 0).length;
  found.copy = all("pre button").length;
  const scale = svg[0].getBoundingClientRect().width / svg[0].viewBox.baseVal.width;
  const size = (one) => parseFloat(frame.getComputedStyle(one).fontSize);
  const sizes = [...svg[0].querySelectorAll("text")].map(size);
  found.small = scale * Math.min(...sizes);
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_card_says_values_hides_lines_and_is_walked_by_keys(
    in_browser, model, probed, reruns, tmp_path, width
):
    findings = Findings(reruns(probed(model("full", path="own:build"))))
    sections = ["k-sweep", "heads"]
    page, _ = write_report(findings, tmp_path / "r", "x", ["svg"], sections=sections, look="<p>one text</p>")
    found = in_browser(page.parent, _CARD.format(width=width))
    assert found["shown"] == 1
    assert found["point"][0] == found["point"][1]
    assert found["point"][0].startswith("top-k by head, k = ")
    assert found["off"] == [0, found["kinds"], 0]
    assert found["cell"].startswith("Layer 0, head 0: ")
    quantity = findings(head_cells).quantity
    assert found["address"] == f"look.html#1.0.{quantity}"  # right of it is no head
    assert found["stops"] == 1
    assert found["copy"] == 1
    assert found["small"] >= 11.8
