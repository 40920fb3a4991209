"""The README and the program say the same."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (semdiag [^\n]*)\n(.*?)```", README, re.S)


def program(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from semdiag.commands.main import main; sys.argv[0] = 'semdiag'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


def commands() -> list[str]:
    return re.findall(r"^│ ([a-z-]+)  ", program("--help").stdout.split("Commands")[1], re.M)


def test_every_command_has_a_section_with_a_real_example() -> None:
    shown = {shlex.split(line)[1] for line, _ in EXAMPLES}
    assert commands(), "no command found in the help"
    for command in commands():
        assert f"### `semdiag {command}`" in README
        assert command in shown


def test_every_section_is_about_a_command_that_exists() -> None:
    assert set(re.findall(r"^### `semdiag ([a-z-]+)`", README, re.M)) == set(commands())


@pytest.mark.parametrize("command", sorted({shlex.split(line)[1] for line, _ in EXAMPLES}))
def test_every_option_the_readme_uses_is_known(command: str) -> None:
    used = {w for line, _ in EXAMPLES for w in shlex.split(line) if w.startswith("--") and f" {command} " in line}
    known = program(command, "--help").stdout
    assert all(option in known for option in used)


@pytest.mark.parametrize(("line", "printed"), [e for e in EXAMPLES if not e[0].startswith("semdiag train")])
def test_the_printed_output_is_what_the_program_prints(line: str, printed: str, tmp_path: Path) -> None:
    """Word for word; numbers to 1 %, since processors round differently. ``…`` stands for lines left out."""
    words = shlex.split(line)[1:]
    writing = {"dispersion", "separation", "stability", "bounds", "mask-stability", "k-sweep", "report"}
    if words[0] in {*writing, "lipschitz", "landscape", "convergence"}:
        words += ["--out", str(tmp_path / "out"), "--figures", "none"]
    done = program(*words)
    assert done.returncode == 0, done.stderr
    lines = [_words(text) for text in (done.stdout + done.stderr).splitlines()]
    for expected in printed.splitlines():
        if expected.strip() and "…" not in expected and "reports/" not in expected:
            assert any(_same(_words(expected), found) for found in lines), expected


def _words(text: str) -> list[str]:
    return re.sub(r"[│┃━─┏┓┗┛┡┩┌┐└┘├┤┬┴┼╇┳]+", " ", text).split()


def _same(expected: list[str], found: list[str]) -> bool:
    return len(expected) == len(found) and all(map(_close, expected, found))


def _close(expected: str, found: str) -> bool:
    if expected == found:
        return True
    try:  # what is smaller than a millionth is rounding
        return float(found.rstrip("%")) == pytest.approx(float(expected.rstrip("%")), rel=0.01, abs=1e-6)
    except ValueError:
        return False


def test_the_commands_for_a_fresh_machine_install_and_run_or_test() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    first, second = blocks[0].strip(), blocks[1].strip()
    assert first.endswith(".venv/bin/semdiag report")
    assert second.endswith(".venv/bin/pytest")
    assert all(b.startswith("python3 -m venv .venv && .venv/bin/pip install ") for b in (first, second))


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.S))
def test_the_python_examples_run(example: str) -> None:
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", README):
        name = target[0] or target[1]
        if not name.startswith("http"):
            assert (ROOT / name).exists(), name
