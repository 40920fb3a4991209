"""Draw reports/minilm/look.gif: what `semdiag look` shows while the slider moves. Needs Chromium and Pillow."""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

REPORT = Path(__file__).parents[1] / "reports" / "minilm"
SIZE = (1100, 860)
COLOURS = 128
QUERY = 10  # the token that is clicked
# Head of the map (layer.head), k of the slider, and milliseconds of each picture.
FRAMES = [
    ("1.8", 1, 900),
    ("1.8", 2, 500),
    ("1.8", 3, 500),
    ("1.8", 5, 900),
    ("1.8", 8, 500),
    ("1.8", 12, 1200),
    ("4.3", 12, 1200),
    ("4.3", 5, 900),
    ("4.3", 2, 900),
]
_MOVE = """<script>
document.querySelectorAll("#tokens button")[{query}].click();
const slider = document.getElementById("slider");
slider.value = {k};
slider.dispatchEvent(new Event("input"));
</script></body>"""


def picture(browser: str, page: str, head: str, k: int, folder: Path) -> Image.Image:
    """Return the page as Chromium shows it for a head and a k."""
    html = folder / "look.html"
    html.write_text(page.replace("</body>", _MOVE.format(k=k, query=QUERY)), encoding="utf-8")
    shot = folder / "look.png"
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
    offline = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    target = (f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", f"{html.as_uri()}#{head}")
    subprocess.run([browser, *options, *offline, *target], check=True, capture_output=True, timeout=120)
    with Image.open(shot) as image:
        return image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def main(browser: str = "chromium") -> None:
    """Draw every picture, and write them as one animation."""
    page = (REPORT / "look.html").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        pictures = [picture(browser, page, head, k, Path(folder)) for head, k, _ in FRAMES]
    durations = [duration for *_, duration in FRAMES]
    first, *later = pictures
    first.save(REPORT / "look.gif", save_all=True, append_images=later, duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
