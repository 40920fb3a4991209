"""README, docs and program say the same."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from semdiag.commands.main import main
from semdiag.measuring.metrics import METRICS
from semdiag.questions import registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "commands").glob("*.md"))}
EXAMPLES = [
    example
    for page in PAGES.values()
    for example in re.findall(r"```console\n\$ (semdiag [^\n]*)\n(.*?)```", page, re.S)
]
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *(p for f in ("docs", "experiments", "checkpoints") for p in (ROOT / f).rglob("*.md")),
]
PYTHON = [
    pytest.param(example, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", ROOT / "docs" / "python.md", ROOT / "docs" / "engines.md")
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?![\w])")

FAULTY = re.compile(r"^[1-9][\d,]* of .* faulty\.$|does not explain [1-9]", re.M)  # said of selections that fail
WRITING = {*registry.reported(), "report"}  # commands that write a page
# Above three seconds alone. What trains prints accuracies that are the processor's, and is not compared.
SLOW = {"bounds", "check", "convergence", "k-sweep", "landscape", "lipschitz", "mask-stability", "report", "sweep"}
NIGHTLY = {"lipschitz", "report"}  # half a minute; .ci/run writes a report of all checkpoints
WITHOUT_NUMBERS = {"list", "info", "report", "sweep"}
COMPARED = [
    pytest.param(
        line,
        printed,
        id=line.split()[1],
        marks=[
            *[pytest.mark.slow] * (line.split()[1] in SLOW),
            *[pytest.mark.nightly] * (line.split()[1] in NIGHTLY),
            *[pytest.mark.processor] * (line.split()[1] not in {*WITHOUT_NUMBERS, "lipschitz"}),  # half a minute
        ],
    )
    for line, printed in EXAMPLES
    if line.split()[1] != "train"
]

_IN_LOGS = re.compile(r"^semdiag: (?:measuring|drawing|training|learning) .*\n", re.M)  # a terminal has bars
Program = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def made_by_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what the scripts in docs write for the examples of the pages. Do not write to it."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(ROOT / "docs" / "selections.py"))
        quantised = runpy.run_path(str(ROOT / "docs" / "quantised.py"))
        quantised["copy"](str(ROOT / "checkpoints" / "even-pairs-full-seed-153476998"), "four-bits.pt", 4)
    return folder


@pytest.fixture
def program(made_by_docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program in this process, in a folder that has the checkpoints: exit code and what a terminal shows."""
    for path in (ROOT / "checkpoints", ROOT / "experiments", *made_by_docs.iterdir()):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("SEMDIAG_CHECKPOINTS", raising=False)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["semdiag", *words])
        shown = io.StringIO()
        with (
            contextlib.redirect_stdout(shown),
            contextlib.redirect_stderr(shown),
            pytest.raises(SystemExit) as left,
        ):
            main()
        return int(left.value.code or 0), _IN_LOGS.sub("", shown.getvalue())

    return run


@cache
def fresh(*words: str) -> str:
    """What a process of its own prints, both streams."""
    code = "import sys; from semdiag.commands.main import main; sys.argv[0] = 'semdiag'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return _IN_LOGS.sub("", done.stdout)


def commands() -> list[str]:
    return re.findall(r"^│ ([a-z][a-z-]+)  ", fresh("--help"), re.M)


@pytest.mark.slow
def test_every_command_has_a_part_of_a_page_with_a_real_example_and_the_index_links_it() -> None:
    assert commands(), "no command found in the help"
    headed = {
        name: page for page, text in PAGES.items() for name in re.findall(r"^##? `semdiag ([\w-]+)`$", text, re.M)
    }
    assert set(headed) == set(commands()), (
        "a heading `semdiag NAME` in docs/commands for every command, and no other"
    )
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for command, page in headed.items():
        assert f"```console\n$ semdiag {command}" in PAGES[page]
        assert f"(commands/{page}.md)" in index
        assert f"\n## {command}\n" in PAGES["options"]


def test_the_glossary_has_every_metric_with_a_symbol_and_no_other_symbol_for_one() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    symbols = {name.lower(): symbol for name, symbol in re.findall(r"\*\*([\w ]+)\*\* ?(\w*):", page)}
    for metric in METRICS.values():
        assert symbols.get(metric.title, metric.symbol) == metric.symbol, metric.name
        assert not metric.symbol or metric.title in symbols, metric.name


def test_the_page_of_options_is_made_from_the_program() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "options.py"))["page"]()
    assert made == PAGES["options"], "python docs/options.py"


def test_pages_are_few_and_short() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert len(pages) <= 22
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 20_000, "words, examples too"


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1]
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages | {"README.md"}


def test_the_front_door_is_short() -> None:
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize("command", sorted({shlex.split(line)[1] for line, _ in EXAMPLES}))
def test_every_option_of_the_examples_is_known(command: str, program: Program) -> None:
    used = {w for line, _ in EXAMPLES for w in shlex.split(line) if w.startswith("--") and f" {command} " in line}
    code, known = program(command, "--help-all")
    assert code == 0
    assert all(option in known for option in used)


def test_the_first_line_of_every_command_is_its_answer() -> None:
    """Examples are compared with the program, place by place: their first lines are those of terminals."""
    for line, printed in EXAMPLES:
        first, command = printed.splitlines()[0], line.split()[1]
        if command not in ("list", "train"):  # which answers nothing, and shows a bar
            assert len(first) <= 200, (command, first)
            assert re.search(r"\w+ \w+ \w+", first), (command, first)
            assert not re.search(r"[│─]|\S   +\S", first), (command, first)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "printed"), COMPARED)
def test_the_printed_output_is_what_the_program_prints(line: str, printed: str, program: Program) -> None:
    words = shlex.split(line)[1:]
    if "copier:build" in words:
        pytest.importorskip("transformers", reason="Tokenizers need the extra hf")
        runpy.run_path(str(ROOT / "docs" / "copier.py"))
    if "hf:mixture" in words:
        transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
        if not hasattr(transformers, "DeepseekV32Config"):
            pytest.skip("this transformers has no DeepSeek-V3.2")
        runpy.run_path(str(ROOT / "docs" / "mixture.py"))
        words += ["--device", "cpu"]  # some of its keys tie, and another device takes others of them
    code, shown = program(*words, *["--figures", "none"] * (words[0] in WRITING))
    assert code == bool(FAULTY.search(printed)), shown
    assert missing(printed, shown) is None, shown


@pytest.mark.slow
def test_a_process_of_its_own_prints_the_same(tmp_path: Path) -> None:
    line, printed = next(e for e in EXAMPLES if e[0].startswith("semdiag separation"))
    shown = fresh(*shlex.split(line)[1:], "--figures", "none", "--out", str(tmp_path / "out"))
    without_page = [text for text in printed.splitlines() if not text.startswith("Page:")]
    assert missing("\n".join([*without_page, "…"]), shown) is None, shown


def missing(printed: str, shown: str) -> str | None:
    """Compare an example with what was shown, line by line, in order.

    Lines that begin with ``…`` stand for any lines, and nothing else does; blank lines and the rules of tables do
    not count.

    Returns:
        The lines that are not where they should be; None if all are.
    """
    lines = [words for text in shown.splitlines() if (words := _words(text))]
    expected = [words for text in printed.splitlines() if (words := _words(text))]
    groups = [(key, list(own)) for key, own in groupby(expected, lambda words: words[0].startswith("…"))]
    place, free = 0, False  # free: what comes next may stand anywhere behind the place
    for number, (left_out, part) in enumerate(groups):
        if left_out:
            free = True
            continue
        end = len(lines) - len(part)
        last = number == len(groups) - 1
        starts = [place] if not free else [end] if last else range(place, end + 1)
        found = [at for at in starts if at >= place and _agree(part, lines[at : at + len(part)])]
        if not found:
            return "\n".join(" ".join(words) for words in part)
        place, free = found[0] + len(part), False
    if not free and place != len(lines):
        return f"(end of the example; more was shown: {' '.join(lines[place])})"
    return None


def _words(text: str) -> list[str]:
    return re.sub(r"[│┃━─┏┓┗┛┡┩┌┐└┘├┤┬┴┼╇┳]+", " ", text).split()


def _agree(expected: list[list[str]], found: list[list[str]]) -> bool:
    return len(expected) == len(found) and all(
        len(a) == len(b) and all(_same(one, other) for one, other in zip(a, b, strict=True))
        for a, b in zip(expected, found, strict=True)
    )


def _same(expected: str, found: str) -> bool:
    """Whether two words are the same but for one unit of the last printed digit of each number with a fraction.

    Processors differ in the last of float64's 16 digits, by which a third digit may be rounded up or down, and
    no more than that. Whole numbers are counts, and the same.
    """
    if expected == found:
        return True
    pairs = [NUMBER.findall(word) for word in (expected, found)]
    if NUMBER.sub("#", expected) != NUMBER.sub("#", found):
        return False
    for texts in zip(*pairs, strict=True):
        a, b = (Decimal(text.replace(",", "")) for text in texts)
        exponents = [int(number.as_tuple().exponent) for number in (a, b)]
        unit = Decimal(1).scaleb(min(exponents)) if min(exponents) < 0 else Decimal(0)
        if abs(a - b) > unit:
            return False
    return True


@pytest.mark.parametrize(
    ("printed", "shown", "lacks"),
    [
        ("a 1.23\nb 2", "a 1.24\n\nb 2\n", None),
        ("a 1.23\nb 2", "a 1.25\nb 2", "a 1.23 b 2"),
        ("a 1.23\nb 2", "a 1.23\nb 3", "a 1.23 b 2"),
        ("a\nc", "a\nb\nc", "a c"),
        ("a\n…\nc", "a\nb\nc", None),
        ("…\nc", "a\nc\nb\nc", None),
        ("a", "a\nb", "(end of the example; more was shown: b)"),
        ("a\n…", "a\nb\nc", None),
        ("c\n…\na", "a\nb\nc", "c"),
        ("1.2% of 3,000.", "1.3% of 3,000.", None),
        ("1.2% of 3,000.", "1.2% of 3,001.", "1.2% of 3,000."),
        ("12", "11.9", None),
        ("2.0e-08", "2.1e-08", None),
    ],
)
def test_lines_are_left_out_only_where_the_example_says_so(printed: str, shown: str, lacks: str | None) -> None:
    found = missing(printed, shown)
    assert (found and found.replace("\n", " ")) == lacks


def test_the_commands_for_a_fresh_machine_install_and_run_or_test() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    commands = [block.strip() for block in blocks]
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install ") for command in commands)
    ends = [command.rpartition(" && ")[2] for command in commands]
    assert ends == [
        ".venv/bin/semdiag report hf:PATH --inputs texts.txt",
        ".venv/bin/semdiag report",
        ".venv/bin/pytest",
    ]


@pytest.mark.slow
def test_the_recipe_shows_that_top_k_learns_sooner(program: Program, tmp_path: Path) -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^semdiag (train .* --attention topk --k 5)$", recipes, re.M)
    lines = [line, line.replace("--attention topk --k 5", "--attention full")]
    epochs = []
    for number, line in enumerate(lines):  # the checkpoints of the repository are not to be added to
        code, said = program(*shlex.split(line), "--quiet", "--out", str(tmp_path / f"run-{number}"))
        assert code == 0
        found = re.search(r"after (\d+) epochs, stopped at --until 0.95", said)
        assert found, said
        epochs.append(int(found[1]))
    topk, full = epochs
    assert 1.5 * topk < full, "14 and 38 epochs where this was written; rounding moves them"


@pytest.mark.parametrize("example", PYTHON)
def test_the_python_examples_run(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(text: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text.read_text(encoding="utf-8")):
        if not name.startswith("http"):
            target = text.parent / name if name else text
            assert target.exists(), name
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name}#{anchor}"


def anchors(page: str) -> set[str]:
    """The anchors of a page: of its headings, as GitHub names them, and those written out."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.S), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {
        *re.findall(r'<a id="([^"]+)"', page),
        *(re.sub(r"[^\w\- ]", "", one).replace(" ", "-") for one in plain),
    }


def test_anchors_are_those_of_headings() -> None:
    page = '# `a b`: C?\n```sh\n# no heading\n```\n## See [the *x*](y.md)\n<a id="z"></a>\n'
    assert anchors(page) == {"a-b-c", "see-the-x", "z"}


def test_every_page_of_the_docs_is_in_their_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):  # README.md links those of the commands
        assert page.name == "README.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(text: Path) -> None:
    if text.name == "CHANGELOG.md":
        pytest.skip("it names files that are gone")
    places = [ROOT, text.parent, *(ROOT / folder for folder in ("diagnostics", "diagnostics/semdiag", "models"))]
    file = re.compile(r"(?<![\w/:.<{-])(?:[\w-]+/)+[\w.-]+\.(?:py|sh|md|toml|ipynb)\b")
    named = set(file.findall(text.read_text(encoding="utf-8")))
    assert not {name for name in named if not any((place / name).exists() for place in places)}


def gallery() -> list[tuple[list[str], str]]:
    """The pictures of the gallery, each with the command that the page says drew it."""
    page = (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8").partition("## Gallery")[2]
    parts = re.findall(r"((?:^\[!\[.*\n)+)\n.*\n\n```sh\n(.*)\n```", page, re.M)
    return [(re.findall(r"\]\(([^()\s]+)\)$", pictures, re.M), command) for pictures, command in parts]


def test_the_gallery_names_the_command_of_each_of_its_pictures() -> None:
    shown = gallery()
    page = (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8")
    assert sum(len(pictures) for pictures, _ in shown) == page.count("[![") > 5
    for pictures, command in shown:
        folders = {(ROOT / "docs" / picture).resolve().parent for picture in pictures}
        (folder,) = folders
        if command.startswith("semdiag "):
            summary = json.loads((folder.parent / "summary.json").read_text(encoding="utf-8"))
            assert command == summary["command"].removesuffix(" --quiet")
        else:
            assert command.endswith(f" {folder.relative_to(ROOT)}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pictures", "command"), [pytest.param(*entry, id=entry[1]) for entry in gallery() if "python" in entry[1]]
)
def test_the_command_draws_the_picture_of_the_gallery(pictures: list[str], command: str, tmp_path: Path) -> None:
    """In a copy of its tables; what is written in the picture is compared."""
    _, script, folder = command.split()
    shutil.copytree(ROOT / folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.svg"))
    subprocess.run([sys.executable, ROOT / script, tmp_path / "copy"], check=True, capture_output=True)
    for picture in pictures:
        drawn, shipped = (
            re.findall(r"<text[^>]*>([^<]*)", path.read_text(encoding="utf-8"))
            for path in (tmp_path / "copy" / Path(picture).name, ROOT / "docs" / picture)
        )
        assert drawn == shipped
        assert len(shipped) > 10


def test_the_texts_without_harm_are_as_many_as_the_page_says() -> None:
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    said = [(int(share), int(count)) for share, count in re.findall(r"(\d+)% with (\d+)", page)]
    assert len(said) == 3
    for share, count in said:
        assert 1 - 0.05 ** (1 / count) <= share / 100 < 1 - 0.05 ** (1 / (count - 1))


def test_the_citation_is_that_of_this_version() -> None:
    said = {
        name: re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.M)
        for name, pattern in (
            ("pyproject.toml", r'^version = "(.*)"'),
            ("CITATION.cff", r"^version: (.*)"),
            ("README.md", r"@software\{.*version = \{(.*?)\}"),
        )
    }
    assert len({found[1] for found in said.values() if found}) == 1
    assert all(said.values())
