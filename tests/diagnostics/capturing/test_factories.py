"""Models that a user's own function builds."""

import sys

import pytest
import torch

from semdiag import load
from semdiag_files import InputError
from semdiag_models import Encoder

SOURCE = """
import torch
from semdiag_models import Encoder
from semdiag_models import ModelConfig
from semdiag_files import InputError
sizes = 3
def build():
    return torch.nn.Linear(3, 3).train()
def with_inputs():
    return torch.nn.Linear(3, 3), [torch.zeros(2, 3)]
def ours():
    return Encoder(ModelConfig(vocabulary_size=3, classes=2, length=4, blocks=1))
def number():
    return 5
def leaves():
    raise SystemExit(3)


def broken():
    raise RuntimeError("no weights here\\nsecond line")
def needs(size):
    return torch.nn.Linear(size, size)
def refuses():
    raise InputError("Set WEIGHTS first.")
"""


@pytest.fixture(autouse=True)
def own_package(tmp_path, monkeypatch):
    """A folder with a package ``ownmodels`` that stands nowhere but in the current folder."""
    package = tmp_path / "ownmodels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "made.py").write_text(SOURCE, encoding="utf-8")
    (package / "wrong.py").write_text("import nothing_of_this_name", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "ownmodels"]:
        del sys.modules[name]


def test_the_current_folder_is_imported_from_and_the_path_is_as_before():
    before = list(sys.path)
    model = load("ownmodels.made:build")
    assert isinstance(model.module, torch.nn.Linear)
    assert not model.module.training
    assert (model.external, model.source, model.sha256, model.batches) == (True, "factory", "", None)
    assert sys.path == before


def test_inputs_may_come_with_the_model():
    (batch,) = load("ownmodels.made:with_inputs").batches
    assert batch.shape == (2, 3)


def test_an_encoder_of_ours_is_no_external_model():
    model = load("ownmodels.made:ours")
    assert isinstance(model.encoder, Encoder)
    assert (model.external, model.source) == (False, "python")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ownmodels.made:bild", r"^Unknown function of ownmodels\.made 'bild'\. Did you mean 'build'\? Known: "),
        ("ownmodels.made:sizes", r"^Unknown function of ownmodels\.made 'sizes'\."),
        ("ownmodels.made:number", r"^ownmodels\.made:number must return a torch\.nn\.Module.* Got int\.$"),
        ("ownmodels.made:broken", r"^ownmodels\.made:broken failed \(RuntimeError: no weights here\)\."),
        (
            "ownmodels.made:needs",
            r"^ownmodels\.made:needs failed \(TypeError: .*It is called without arguments",
        ),
        ("ownmodels.made:leaves", r"^ownmodels\.made:leaves failed \(SystemExit: 3\)\."),
        ("ownmodels.made:refuses", r"^Set WEIGHTS first\.$"),
        (
            "ownmodels.none:build",
            r"^ownmodels\.none cannot be imported .* It is looked for in ",
        ),
        ("ownmodels.wrong:build", r"^ownmodels\.wrong cannot be imported \(ModuleNotFoundError: .*\)\.$"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(spec, message):
    with pytest.raises(InputError, match=message) as refused:
        load(spec)
    assert "\n" not in str(refused.value)


def test_a_file_of_that_name_is_a_file(tmp_path):
    (tmp_path / "ownmodels:build").write_bytes(b"no checkpoint")
    with pytest.raises(InputError, match="is not a checkpoint"):
        load("ownmodels:build")


def test_commands_that_need_our_encoder_refuse_others_and_say_what_works():
    with pytest.raises(InputError, match=r"^ownmodels\.made:build is a Linear: .* These work on any model: "):
        _ = load("ownmodels.made:build").encoder
