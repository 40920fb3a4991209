"""The program as a whole: quick help, and a border where errors become one line."""

import io
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from typing import get_type_hints

import pytest
import typer

from semdiag.commands import main as module
from semdiag_files import InputError

COMMANDS = ["list", "train", "info", "dispersion", "separation", "report", "check"]
_SPY = """
import sys
from semdiag.commands.main import main
try:
    main()
finally:
    slow = {"torch", "pandas", "seaborn", "matplotlib", "numpy"} & set(sys.modules)
    print(f"slow: {sorted(slow)}", file=sys.stderr)
"""


def spied(*words, **environment):
    environment = {**os.environ, "COLUMNS": "120", **environment}
    command = [sys.executable, "-c", _SPY, *words]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_and_version_import_nothing_slow(words):
    done = spied(*words)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr == "slow: []\n"


@pytest.mark.slow
def test_completion_imports_nothing_slow():
    done = spied(_SEMDIAG_COMPLETE="complete_bash", COMP_WORDS="semdiag disp", COMP_CWORD="1")
    code = spied(**{"_-C_COMPLETE": "complete_bash", "COMP_WORDS": "-c disp", "COMP_CWORD": "1"})
    assert done.stderr.endswith("slow: []\n")
    assert code.stderr.endswith("slow: []\n")


def test_the_version_is_that_of_the_package(run_semdiag):
    outcome = run_semdiag("--version")
    assert (outcome.code, outcome.out, outcome.err) == (0, version("semdiag") + "\n", "")


def test_every_command_stands_in_the_help(run_semdiag):
    outcome = run_semdiag("--help")
    assert outcome.code == 0
    assert all(f" {name} " in outcome.out for name in COMMANDS)


@pytest.mark.slow
def test_every_declared_option_stands_in_the_help_of_the_installed_typer(run_semdiag, monkeypatch):
    """The functions' parameters are walked: typer 0.27 drops an option whose metavar is its name in capitals."""
    monkeypatch.setenv("COLUMNS", "200")
    for registered in module.app.registered_commands:
        help_text = run_semdiag(registered.name, "--help-all").out
        shown = {w for row in re.findall(r"^│ [* ]*(-.*)$", help_text, re.M) for w in re.split(r"[ ,/]+", row)}
        for name, kind in get_type_hints(registered.callback, include_extras=True).items():
            for option in getattr(kind, "__metadata__", ()):
                if isinstance(option, typer.models.OptionInfo) and not option.hidden:
                    first = option.default  # in Annotated the first declaration is in the place of the default
                    declared = [one for one in (first, *(option.param_decls or ())) if isinstance(one, str)]
                    spelled = "/".join(declared) or f"--{name.replace('_', '-')}"
                    flags = set(spelled.split("/"))
                    assert flags <= shown, f"{registered.name} {flags - shown}"
                    assert (option.metavar or "").lower() != name, f"{registered.name}: {flags}"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_breaks_its_lines_where_the_terminal_ends(columns, run_semdiag, monkeypatch):
    """A line of a paragraph ends where the next word would not have fit; nowhere because the source's line did."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in module.app.registered_commands:
        printed = run_semdiag(command.name, "--help-all").out.splitlines()
        lines = ["" if line.startswith(" " * 5) else line.strip() for line in printed]  # indented: an example
        text = lines[: next(at for at, line in enumerate(lines) if line.startswith("╭"))]
        assert len(text) > 4
        for line, following in pairwise(text):
            if line and following:
                assert len(line) + 1 + len(following.split()[0]) > columns - 2, (command.name, line)


def test_no_help_of_an_option_breaks_its_lines():
    for command in typer.main.get_command(module.app).commands.values():
        helps = [getattr(parameter, "help", None) or "" for parameter in command.params]
        assert not [text for text in helps if "\n" in text]


def test_without_a_command_the_help_is_shown(run_semdiag):
    outcome = run_semdiag()
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage:" in outcome.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dispersoin"], "No such command 'dispersoin'. Did you mean 'dispersion'?"),
        (["info"], "Missing argument"),
        (["list", "--colour"], "No such option"),
        (["check", "--samples", "many"], "Invalid value for '--samples'"),
    ],
)
def test_words_that_make_no_sense_are_refused_in_one_line(refusal, words, message):
    line = refusal(*words)
    assert message in line
    command = "" if words == ["dispersoin"] else f" {words[0]}"
    assert line.endswith(f"semdiag{command} --help")


@pytest.fixture
def program(run_semdiag, monkeypatch):
    """Call with an exception: the program, which raises it."""

    def run(error, *words):
        def fail(standalone_mode):
            raise error

        monkeypatch.setattr(module, "app", fail)
        return run_semdiag(*words)

    return run


def test_an_error_of_the_users_input_is_one_line_and_code_2(program):
    outcome = program(InputError("what was wrong,\nand what would work."))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "semdiag: what was wrong, and what would work.\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_code_130(program, error):
    outcome = program(error)
    assert (outcome.code, outcome.err) == (130, "semdiag: interrupted\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(13, "Permission denied", "kept.npy"),
            "kept.npy cannot be read or written: Permission denied.",
        ),
        (OSError(28, "No space left on device"), "A file cannot be read or written: No space left on device."),
        (OSError("odd"), "A file cannot be read or written: odd."),
    ],
)
def test_what_the_system_refuses_is_one_line_and_code_2(program, error, message):
    outcome = program(error)
    assert (outcome.code, outcome.out, outcome.err) == (2, "", f"semdiag: {message}\n")


def test_a_reader_who_has_seen_enough_ends_the_program_without_a_word(monkeypatch):
    def fail(standalone_mode):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "argv", ["semdiag"])
    monkeypatch.setattr(module, "app", fail)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 141
    assert sys.stdout.closed
    assert sys.stderr.closed


def test_who_leaves_by_itself_is_named(program):
    outcome = program(SystemExit(3))
    assert outcome.code == 2
    assert outcome.err.startswith("semdiag: The model's code ended the program (SystemExit: 3, in ")


def test_completion_of_words_leaves_with_its_own_code(program, monkeypatch):
    from typer import completion

    monkeypatch.setitem(completion.__dict__, "leave", lambda: sys.exit(0))
    exec("def leave(): raise SystemExit(0)", completion.__dict__)  # as Typer's own functions do
    monkeypatch.setattr(module, "app", lambda standalone_mode: completion.leave())
    monkeypatch.setattr(sys, "argv", ["semdiag"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("error", [ValueError("a fault of ours"), ZeroDivisionError()])
def test_our_own_faults_are_no_failed_check(program, error, debug):
    """Exit code 1 says that a check failed; the traceback is shown to whom asks for it."""
    outcome = program(error, *["--debug"] * debug)
    *traced, said = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (70, "")
    assert said.startswith(f"semdiag: an error of semdiag itself, not of your input: {type(error).__name__}")
    assert "Please report it" in said
    assert bool(traced) == debug == ("--debug" not in said)
    assert (traced[:1] == ["Traceback (most recent call last):"]) == debug


def test_an_index_that_a_gpu_refuses_is_no_fault_of_ours(program):
    outcome = program(RuntimeError("CUDA error: device-side assert triggered"))
    assert outcome.code == 2
    assert "The same command with --device cpu says which." in outcome.err


def test_our_own_faults_are_told_before_anything_is_imported(program, monkeypatch):
    monkeypatch.delitem(sys.modules, "semdiag_files.errors")
    assert program(ValueError("a fault of ours")).code == 70


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list"], ["info", "{}", "--json"]])
def test_a_reader_who_left_before_the_end_is_code_141(words, tiny_runs):
    """As of other programs; not 1, which is a failed check: Typer and rich would leave with that."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "semdiag", *(word.format(tiny_runs.full / "last.pt") for word in words)]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="processes are interrupted otherwise there")
def test_control_c_in_a_real_process_is_told_in_one_line(tmp_path):
    made = "import time\n\n\ndef make():\n    print('at work', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "own_made.py").write_text(made, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "semdiag", "dispersion", "own_made:make"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
    )
    assert process.stdout.readline() == "at work\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "semdiag: interrupted\n")


@pytest.mark.slow
def test_the_program_can_be_run_as_a_module():
    command = [sys.executable, "-m", "semdiag.commands.main", "info", "nowhere.pt"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "semdiag: nowhere.pt does not exist.\n")


@pytest.mark.parametrize("words", [["dispersion", ""], ["report", "a.pt", "--out", " "]])
def test_an_empty_word_is_refused_and_not_taken_for_the_working_folder(words):
    done = spied(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("semdiag: An argument of the command is empty.")


def test_debug_goes_anywhere_and_is_no_part_of_the_command(run_semdiag):
    for words in (["--debug", "info", "nothing.pt"], ["info", "nothing.pt", "--debug"]):
        outcome = run_semdiag(*words)
        assert (outcome.code, outcome.err) == (2, "semdiag: nothing.pt does not exist.\n")
