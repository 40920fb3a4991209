"""What a model chose, as files: the same whatever the padding and the batches are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from indexers_by_hand import INDEXED, LENGTH

from semdiag import InputError
from semdiag.capturing.loading import LoadedModel
from semdiag.mathematics.rounding import FORMATS
from semdiag.selections.capture import Choices
from semdiag.selections.compare import compare_selections
from semdiag.selections.files import read_selection
from semdiag.selections.own import Saving, own_selections


def saved(model, path, *batches):
    """The files of a model's selections."""
    saving = Saving(path)
    loaded = LoadedModel("tiny", "", model, "hugging face", "unknown")
    own_selections(loaded, batches, FORMATS["bfloat16"], torch.device("cpu"), torch.float32, saving)
    return saving.write()


def choices(kind="experts", rows=4, k=2, n=5, real=None, first=0, samples=2):
    """Choices of rows of random scores."""
    order = torch.randn(rows, n, generator=torch.Generator().manual_seed(rows + n))
    counts = torch.ones(rows, dtype=torch.bool) if real is None else torch.tensor(real)
    begin = torch.full((rows,), first)
    order = order.masked_fill(torch.arange(n) < begin[:, None], -torch.inf)
    return Choices(kind, (samples, rows // samples), order.topk(k, 1).indices, order, counts, begin)


def test_experts_are_saved_token_by_token(tmp_path):
    saving, own = Saving(tmp_path / "own.npz"), choices(real=[True, True, False, True])
    other = choices(real=[True, True, False, True], n=5)
    ids = torch.tensor([[7, 8], [9, 3]])
    saving.add("layers.0.gate", 0, own, ids)
    saving.add("layers.1.gate", 0, other, ids)
    (path,) = saving.write()
    with np.load(path) as arrays:
        assert arrays["tokens"].tolist() == [7, 8, 3]
        assert (arrays["indices"].shape, arrays["scores"].shape) == ((3, 2, 2), (3, 2, 5))
        assert arrays["indices"][:, 0].tolist() == own.indices[[0, 1, 3]].tolist()
        assert arrays["scores"][:, 1].tolist() == other.order[[0, 1, 3]].tolist()


def test_keys_are_counted_from_the_first_real_one(tmp_path):
    saving = Saving(tmp_path / "own.npz")
    own = choices("keys", rows=5, n=5, real=[False, False, True, True, True], first=2, samples=1)
    saving.add("indexer", 0, own, None)
    (path,) = saving.write()
    with np.load(path) as arrays:
        assert sorted(arrays) == ["indices", "scores"]
        assert arrays["indices"][:, 0].tolist() == (own.indices[2:] - 2).tolist()
        assert arrays["scores"][:, 0].tolist() == own.order[2:, 2:].tolist()


def test_batches_of_other_lengths_get_one_width(tmp_path):
    saving = Saving(tmp_path / "own.npz")
    for rows, k in ((6, 3), (2, 1)):
        saving.add("indexer", 0, choices("keys", rows=rows, n=rows, k=k, samples=1), None)
    (path,) = saving.write()
    with np.load(path) as arrays:
        assert (arrays["indices"].shape, arrays["scores"].shape) == ((8, 1, 3), (8, 1, 6))
        assert arrays["indices"][6:, 0, 1:].tolist() == [[-1, -1]] * 2
        assert bool((arrays["scores"][6:, 0, 2:] == -np.inf).all())


def test_runs_of_one_model_compare_whatever_the_batches_are(tiny, batch, tmp_path):
    model = tiny("DeepseekV32", **INDEXED)
    first = saved(model, tmp_path / "whole.npz", batch)
    assert [path.name for path in first] == ["whole.npz", "whole.keys.npz"]
    cut = [{name: each[row : row + 1] for name, each in batch.items()} for row in range(6)]
    for alone in cut:  # the padding goes
        kept = alone["attention_mask"][0].bool()
        alone |= {name: each[:, kept] for name, each in alone.items()}
        assert alone["input_ids"].shape[1] in (LENGTH, LENGTH - 5, LENGTH - 8)
    second = saved(model, tmp_path / "alone.npz", *cut)
    for one, other in zip(first, second, strict=True):
        found = compare_selections(read_selection(one), read_selection(other), "float32")
        assert found.tokens == int(batch["attention_mask"].sum())
        # Positions begin elsewhere without the padding on the left, and rotations are rounded otherwise.
        assert found.rows["overlap"].mean() > 0.97
        ids = [read_selection(path).tokens for path in (one, other)]
        assert torch.equal(*ids)


def test_layers_that_do_not_choose_alike_are_refused(tmp_path):
    saving = Saving(tmp_path / "own.npz")
    saving.add("layers.0.gate", 0, choices(), None)
    saving.add("layers.1.gate", 0, choices(k=1), None)
    with pytest.raises(InputError, match="the layers that choose experts differ"):
        saving.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "said"), [("own.csv", "ends in .npz"), ("none/own.npz", "there is no folder")])
def test_names_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, name, said):
    with pytest.raises(InputError, match=said):
        Saving(tmp_path / name)


def test_more_than_a_file_holds_is_refused(monkeypatch):
    monkeypatch.setattr("semdiag.selections.own._LARGEST", 100)
    with pytest.raises(InputError, match="Save fewer tokens"):
        Saving(Path("own.npz")).add("gate", 0, choices(), None)
