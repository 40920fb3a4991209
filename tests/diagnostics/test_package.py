"""The package's names: explicit, and imported only when they are used."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

import semdiag


def test_every_name_that_is_promised_is_there():
    assert dir(semdiag) == sorted(semdiag.__all__)
    for name in semdiag.__all__:
        assert getattr(semdiag, name).__name__ == name


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'semdiag' has no attribute 'lode'$"):
        _ = semdiag.lode


@pytest.mark.slow
def test_importing_the_package_does_not_import_torch_and_its_parts_are_there():
    code = (
        "import semdiag, sys; print('torch' in sys.modules); semdiag.load; print('torch' in sys.modules); "
        "print(semdiag.__version__, semdiag.mathematics.softmax_stability.__name__); "
        "print('nothing' in dir(semdiag.mathematics))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8", timeout=60
    )
    named = [version("semdiag"), "semdiag.mathematics.softmax_stability"]
    assert done.stdout.split() == ["False", "True", *named, "False"]


_MEASURING = """
import sys
import torch
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), 2).eval()
model(torch.randn(2, 4, 8))
before = set(sys.modules)
import semdiag
semdiag.measure(model, [torch.randn(2, 4, 8)], k=(2,))
heavy = {"sympy", "scipy.stats", "scipy.optimize", "matplotlib", "seaborn", "jinja2"}
print(sorted(heavy & set(sys.modules) - before))
"""


@pytest.mark.slow
def test_measuring_imports_nothing_that_it_does_not_need():
    """Each of these takes a tenth of a second to more than half; torch's own checks bring sympy along."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURING], capture_output=True, check=True, encoding="utf-8", timeout=60
    )
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_modules_are_imported_by_statements_which_the_contracts_see():
    """By string the package and the registry import, a question its own parts, and a user's code is loaded."""
    folder, places = Path(semdiag.__file__).parent, set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if getattr(called, "attr", getattr(called, "id", "")) in ("import_module", "__import__"):
                places.add(file.relative_to(folder).as_posix())
    own, of_users = {"mathematics/__init__.py", "presenting/question.py"}, {"capturing/loading.py"}
    assert places == {"__init__.py", "questions/registry.py"} | own | of_users


def test_no_files_import_each_other_in_a_circle():
    """A package's face aside, which may call on its own files: a question's command calls what measures."""
    grimp = pytest.importorskip("grimp")
    for name in ("semdiag", "semdiag_files", "semdiag_models"):
        graph, inside = grimp.build_graph(name, exclude_type_checking_imports=True), {}
        for file in graph.modules:
            imported = graph.find_modules_directly_imported_by(file)
            inside[file] = {other for other in imported if not other.startswith(f"{file}.")}
        TopologicalSorter(inside).prepare()


@pytest.mark.slow
def test_what_was_found_is_told_drawn_and_written(tiny_models, tmp_path):
    parts = [semdiag.measure(model, model.default_inputs(8, 0)[0]) for model in tiny_models]
    found = semdiag.Measurements.concat(parts)
    said = semdiag.summary(found)
    assert repr(said) == "\n".join(said["verdict"])
    assert said["glances"]["dispersion"]["number"].endswith(" of 1 pair")
    figure = semdiag.plot(found, "dispersion_by_layer")
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(semdiag.InputError, match=r"^Unknown figure 'dispersion_by_layers'\. Did you mean"):
        semdiag.plot(found, "dispersion_by_layers")
    page = semdiag.report(parts[1], tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    assert f"semdiag.report(found, &#39;{tmp_path / 'out'}&#39;)" in page.read_text(encoding="utf-8")
    assert {file.suffix for file in tmp_path.glob("out/figures/*")} == {".png", ".svg"}


def test_what_is_shown_of_objects_is_short(tiny_models):
    found = semdiag.measure(tiny_models[0], tiny_models[0].default_inputs(4, 0)[0])
    for shown in (tiny_models[0], found, semdiag.Findings(found)):
        assert len(repr(shown)) < 300
        assert "\n" not in repr(shown)


@pytest.mark.parametrize(
    ("probe", "plan", "table"),
    [
        (semdiag.k_sweep, None, "sweep"),
        (semdiag.mask_stability, semdiag.NoisePlan(draws=1), "masks"),
        (semdiag.landscape, semdiag.LandscapePlan(grid=3), "landscape"),
        (semdiag.lipschitz, semdiag.LipschitzPlan(planes=2, directions=2, draws=5), "loss_gradients"),
    ],
)
def test_every_probe_returns_measurements_and_runs_where_the_model_is(tiny_models, probe, plan, table):
    tokens, labels, _ = tiny_models[1].default_inputs(4, 0)
    found = probe(tiny_models[1], tokens, labels, plan)
    assert isinstance(found, semdiag.Measurements)
    assert len(getattr(found, table)) > 0
    assert len(found.queries) > 0
    assert found.provenance["device"] == "cpu"
    assert found.provenance["dtype"] == "float64"  # as in the commands


@pytest.mark.parametrize(
    "options", [{"rerun": True, "ks": [2, 3]}, {"plan": semdiag.KSweepPlan(rerun=True, ks=(2, 3))}]
)
def test_options_of_a_plan_may_be_said_in_its_place(tiny_models, options):
    tokens, labels, _ = tiny_models[1].default_inputs(4, 0)
    found = semdiag.k_sweep(tiny_models[1], tokens, labels, **options)
    assert set(found.rerun["k"]) == {0, 2, 3}


def test_an_option_is_said_once_and_one_that_does_not_exist_is_named(tiny_models):
    tokens, labels, _ = tiny_models[0].default_inputs(4, 0)
    with pytest.raises(TypeError, match=r"'levels', but .* and those of LipschitzPlan: .*planes"):
        semdiag.lipschitz(tiny_models[0], tokens, labels, levels=2)
    with pytest.raises(semdiag.InputError, match="rerun: say it in the plan, or leave out the plan"):
        semdiag.k_sweep(tiny_models[0], tokens, labels, semdiag.KSweepPlan(), rerun=True)


def test_a_capture_says_what_it_holds(tiny_models):
    tokens, _, _ = tiny_models[1].default_inputs(4, 0)
    with semdiag.capture(tiny_models[1].encoder, k=3) as calls:
        assert repr(calls).startswith("Calls: none captured yet")
        tiny_models[1].encoder(tokens)
    assert repr(calls).startswith("Calls: 2 calls of 2 layers, 4 samples and 2 heads in the first; k up to 3.")


@pytest.mark.parametrize("budgets", [{}, None, []])
def test_a_file_without_budgets_is_refused(budgets, tmp_path):
    path = tmp_path / "budget.json"
    path.write_text(json.dumps({"schema": "semdiag.budget/1", "budgets": budgets}), encoding="utf-8")
    with pytest.raises(semdiag.InputError, match="holds no budget"):
        semdiag.read_budget(path)
