"""What a model chose, as files: the same whatever the padding and the batches are."""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from indexers_by_hand import INDEXED, LENGTH
from safetensors.torch import save_file

from semdiag import InputError
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.rounding import FORMATS
from semdiag.questions.selections.answer import comparison_summary
from semdiag.selections.capture import Choices
from semdiag.selections.compare import compare_files
from semdiag.selections.files import read_selection, read_selections
from semdiag.selections.own import Saving, own_selections


def saved(model, path, *batches):
    """Write a model's selections."""
    saving = Saving(path)
    loaded = LoadedModel("tiny", "", model, "hugging face", "unknown")
    own_selections(loaded, batches, FORMATS["bfloat16"], torch.device("cpu"), torch.float32, saving)
    saving.write()


def choices(kind="experts", rows=4, k=2, n=5, real=None, first=0, samples=2):
    """Choices of rows of random scores."""
    order = torch.randn(rows, n, generator=torch.Generator().manual_seed(rows + n))
    counts = torch.ones(rows, dtype=torch.bool) if real is None else torch.tensor(real)
    begin = torch.full((rows,), first)
    order = order.masked_fill(torch.arange(n) < begin[:, None], -torch.inf)
    return Choices(kind, (samples, rows // samples), order.topk(k, 1).indices, order, counts, begin)


def test_experts_are_saved_token_by_token(tmp_path):
    saving, first = Saving(tmp_path / "own.npz"), choices(real=[True, True, False, True])
    second = choices(real=[True, True, False, True], n=6, k=1)
    ids = torch.tensor([[7, 8], [9, 3]])
    saving.add("layers.1.gate", 0, first, ids)
    saving.add("layers.0.gate", 0, second, ids)
    saving.write()
    saved_first, saved_second = read_selections(tmp_path / "own.npz")
    assert [each.module for each in (saved_first, saved_second)] == ["layers.1.gate", "layers.0.gate"], (
        "as they ran"
    )
    assert saved_first.tokens.tolist() == [7, 8, 3]
    assert saved_first.indices.tolist() == first.indices[[0, 1, 3]].tolist()
    assert saved_second.scores.tolist() == second.order[[0, 1, 3]].tolist()


def test_keys_are_counted_from_the_first_real_one(tmp_path):
    saving = Saving(tmp_path / "own.npz")
    given = choices("keys", rows=5, n=5, real=[False, False, True, True, True], first=2, samples=1)
    saving.add("indexer", 0, given, None)
    saving.write()
    read = read_selection(tmp_path / "own.npz")
    assert (read.module, read.tokens) == ("indexer", None)
    assert read.indices.tolist() == (given.indices[2:] - 2).tolist()
    assert read.scores.tolist() == given.order[2:, 2:].tolist()


def test_batches_of_other_lengths_get_one_width(tmp_path):
    saving = Saving(tmp_path / "own.npz")
    for rows, k in ((6, 3), (2, 1)):
        saving.add("indexer", 0, choices("keys", rows=rows, n=rows, k=k, samples=1), None)
    saving.write()
    read = read_selection(tmp_path / "own.npz")
    assert (read.indices.shape, read.scores.shape) == ((8, 3), (8, 6))
    assert read.indices[6:, 1:].tolist() == [[-1, -1]] * 2
    assert bool((read.scores[6:, 2:] == -np.inf).all())


def test_runs_of_one_model_compare_whatever_the_batches_are(tiny, batch, tmp_path):
    model = tiny("DeepseekV32", **INDEXED)
    saved(model, tmp_path / "whole.npz", batch)
    cut = [{name: each[row : row + 1] for name, each in batch.items()} for row in range(6)]
    for alone in cut:  # the padding goes
        kept = alone["attention_mask"][0].bool()
        alone |= {name: each[:, kept] for name, each in alone.items()}
        assert alone["input_ids"].shape[1] in (LENGTH, LENGTH - 5, LENGTH - 8)
    saved(model, tmp_path / "alone.npz", *cut)
    files = [read_selections(tmp_path / f"{name}.npz") for name in ("whole", "alone")]
    names = ["model.layers.0.self_attn.indexer", "model.layers.1.self_attn.indexer", "model.layers.1.mlp.gate"]
    for found, name, *ids in zip(
        compare_files(*files, "float32", ("", "")), names, *([file.tokens for file in each] for each in files),
        strict=True,
    ):  # fmt: skip
        assert found.module == name
        assert found.tokens == int(batch["attention_mask"].sum())
        # Positions begin elsewhere without the padding on the left, and rotations are rounded otherwise.
        assert found.rows["overlap"].mean() > 0.97
        assert torch.equal(*ids)


def test_the_first_module_that_differs_is_named_in_the_order_in_which_they_ran(tiny, batch, tmp_path):
    """A mask off by one in the first indexer: neither the file nor the table begins with the experts behind it."""
    model = tiny("DeepseekV32", **INDEXED)
    saved(model, tmp_path / "good.npz", batch)
    indexer = model.model.layers[0].self_attn.indexer
    forward = indexer.forward
    indexer.forward = lambda hidden, residual, places, mask, *rest, **more: forward(
        hidden, residual, places, mask.roll(-1, -1), *rest, **more
    )
    saved(model, tmp_path / "bad.npz", batch)
    files = [read_selections(tmp_path / f"{name}.npz") for name in ("good", "bad")]
    (entry,) = comparison_summary(compare_files(*files, "float32", ("", "")), "good", "bad", {}, {})["results"]
    assert entry["first_module"] == "model.layers.0.self_attn.indexer" == entry["worst"]["module"]
    assert [row["first"] > 0 for row in entry["layers"]][:2] == [True, True]
    assert [(row["module"], row["k"]) for row in entry["layers"]] == [
        ("model.layers.0.self_attn.indexer", 6),
        ("model.layers.1.self_attn.indexer", 6),
        ("model.layers.1.mlp.gate", 3),
    ]


MISTAKES = {
    ("DeepseekV32", "apply_rotary_pos_emb"): "as if pairs were interleaved",
    ("GlmMoeDsa", "apply_rotary_pos_emb_interleave"): "as if the two halves were rotated",
}


@pytest.mark.parametrize(("family", "rotation"), MISTAKES)
def test_a_port_with_another_rotation_is_located_from_two_files(
    tiny, batch, tmp_path, monkeypatch, family, rotation
):
    """The reference's file says how it chose: its own scores are computed from it again, padding and all."""
    model = tiny(family, **INDEXED)
    saved(model, tmp_path / "good.npz", batch)
    rotations = import_module("transformers.models.deepseek_v32.modeling_deepseek_v32")
    (swapped,) = {"apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"} - {rotation}
    monkeypatch.setattr(sys.modules[type(model).__module__], rotation, getattr(rotations, swapped))
    saved(model, tmp_path / "bad.npz", batch)
    files = [read_selections(tmp_path / f"{name}.npz") for name in ("good", "bad")]
    located = compare_files(*files, "float32", ("", ""))[0].located
    assert (located.module, located.stage) == ("model.layers.0.self_attn.indexer", "rotary")
    assert MISTAKES[family, rotation] in located.mistakes
    assert located.explained == 1.0


def test_modules_that_one_file_lacks_are_named(tmp_path):
    for name, modules in (("a", ("gate", "indexer")), ("b", ("gate",))):
        saving = Saving(tmp_path / f"{name}.npz")
        for module in modules:
            saving.add(module, 0, choices(), None)
        saving.write()
    both = [read_selections(tmp_path / f"{name}.npz") for name in "ab"]
    for first, second in (both, both[::-1]):
        with pytest.raises(InputError, match=r"b.npz holds no choices of indexer"):
            compare_files(first, second, "float32", ("", ""))


def test_other_files_by_module_are_read_in_the_order_of_layers(tmp_path):
    indices = torch.tensor([[0, 1], [1, 2]])
    arrays = {f"layers.{n}.indexer.topk_indices": indices + n for n in (10, 2, 0)}
    save_file(arrays | {"tokens": torch.tensor([5, 6])}, tmp_path / "a.safetensors")
    read = read_selections(tmp_path / "a.safetensors")
    assert [each.module for each in read] == [f"layers.{n}.indexer" for n in (0, 2, 10)]
    assert [each.indices[0, 0].item() for each in read] == [0, 2, 10]
    assert all(each.tokens.tolist() == [5, 6] and not each.ignored for each in read)
    with pytest.raises(InputError, match="holds 3 selections"):
        read_selection(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("name", "said"), [("own.csv", "ends in .npz"), ("none/own.npz", "there is no folder")])
def test_names_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, name, said):
    with pytest.raises(InputError, match=said):
        Saving(tmp_path / name)


def test_more_than_a_file_holds_is_refused(monkeypatch):
    monkeypatch.setattr("semdiag.selections.own._LARGEST", 100)
    with pytest.raises(InputError, match="Save fewer tokens"):
        Saving(Path("own.npz")).add("gate", 0, choices(), None)
