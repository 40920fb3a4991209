"""What a user's own code may do to the program: one line, exit code 2, and JSON alone on stdout."""

import json
import os
import subprocess
import sys

import pytest

MODEL = """
import sys
import torch
from torch import nn

class Left(BaseException):
    pass

class Model(nn.Module):
    def forward(self, x):
        print("hello from the model")
        {forward}
        return (x @ x.mT).softmax(-1) @ x

    def eval(self):
        {evaluation}
        return super().eval()

{top}

def build():
    {factory}
    return Model(), [torch.randn(2, 3, 4)]
"""


def code(here, name, **lines):
    parts = dict.fromkeys(("forward", "evaluation", "top", "factory"), "pass") | lines
    (here / f"{name}.py").write_text(MODEL.format(**parts))
    return f"{name}:build"


@pytest.mark.parametrize(
    ("name", "lines", "told"),
    [
        ("leaves", {"forward": "sys.exit(7)"}, "The model's code ended the program (SystemExit: 7, in forward"),
        (
            "raises",
            {"forward": "raise Left('x')"},
            "The model's code ended the program (Left: x, in forward, line",
        ),
        ("makes", {"factory": "raise Left('x')"}, "makes:build failed (Left: x). It is called without"),
        ("imports", {"top": "raise Left('x')"}, "imports cannot be imported (Left: x)."),
        ("evaluates", {"evaluation": "raise ValueError('x')"}, "Model.eval() failed (ValueError: x)."),
    ],
)
def test_what_a_model_raises_is_one_line_and_no_failed_check(run_semdiag, here, name, lines, told):
    outcome = run_semdiag("dispersion", code(here, name, **lines), "--quiet")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith(f"semdiag: {told}")
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("edit", ["sys.path.clear()", "sys.path[:] = sys.path[1:]", "sys.path = [*sys.path]"])
def test_a_module_may_edit_the_path(run_semdiag, here, monkeypatch, edit):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = code(
        here, f"edits{abs(hash(edit))}", top="before = [*sys.path]\n" + edit + "\nsys.path[:] = before[1:]"
    )
    assert run_semdiag("info", spec).code == 0


CHOOSES = "(x @ x.mT).masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf).topk(2, -1)"


@pytest.mark.parametrize("command", ["dispersion", "info", "selections"])
def test_json_stands_alone_whatever_a_model_prints(run_semdiag, here, command):
    places = ["top", "factory"] + ["forward"] * (command != "info")
    printed = {place: f"print('in {place}'); " for place in places}
    forward = printed.pop("forward", "") + CHOOSES
    spec = code(here, f"talks_{command}", **printed, forward=forward)
    outcome = run_semdiag(command, spec, "--json")
    assert json.loads(outcome.out)["schema"].startswith(f"semdiag.{command}/")
    for place in places:
        assert f"in {place}" in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch"])
def test_a_library_that_is_not_installed_is_named(missing, here):
    program = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['semdiag', 'list']; "
    program += "from semdiag.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"semdiag: {missing} is not installed. Install it with: pip install {missing}\n"


@pytest.mark.slow
def test_no_display_of_the_users_is_needed(here):
    words = [sys.executable, "-m", "semdiag", "dispersion", code(here, "shown"), "--figures", "svg", "--quiet"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"MPLBACKEND": "nope"}
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [("--samples", "99999999"), ("--lengths", "2000000000")])
def test_texts_that_fit_no_memory_are_refused_before_they_are_made(run_semdiag, here, words):
    outcome = run_semdiag("retrieval", code(here, "small"), *words)
    assert outcome.code == 2
    assert "The texts that --samples and --lengths ask for would take" in outcome.err
