"""Which tables hold a model's tokens: by what is looked up in them, and by nothing else."""

import pytest
import torch
from torch import nn

from semdiag.capturing.batches import named_embedding
from semdiag.measuring.training_runs import TokenTables, token_ids

IDS = torch.tensor([[3, 1, 4, 1], [0, 5, 2, 5]])


@pytest.mark.parametrize(
    ("look", "axis"),
    [
        (lambda ids: ids, 0),
        (lambda ids: ids.clone().int(), 0),
        (lambda ids: ids.T, 1),
        (lambda ids: torch.cat([torch.full((2, 1), 6), ids], 1), 0),  # a first token of the model's own
        (lambda ids: torch.cat([ids.T, torch.full((2, 2), 6)]), 1),
        (lambda ids: torch.arange(4), None),
        (lambda ids: torch.arange(4).expand(2, -1), None),
        (lambda ids: torch.zeros_like(ids), None),
        (lambda ids: ids.flip(1), None),
        (lambda ids: ids.clamp(max=4), None),
    ],
)
def test_a_table_is_one_of_tokens_if_the_very_ids_are_looked_up_in_it(look, axis):
    table = nn.Embedding(7, 2)
    with TokenTables({"ids": IDS}) as seen:
        table(look(IDS))
    assert seen.axis(table.weight) == axis
    assert [found is table.weight for found in seen.tables["ids"]] == [True] * (axis is not None)


@pytest.mark.parametrize("ids", [torch.arange(4)[None], torch.zeros(2, 4).long(), torch.ones(3, 1).long()])
def test_ids_that_may_be_positions_or_types_tell_only_where_they_are_not_copied(ids):
    tokens, others = nn.Embedding(7, 2), nn.Embedding(7, 2)
    with TokenTables(token_ids(ids)) as seen:
        others(ids.clone())
        tokens(ids.view(ids.shape))
    assert (seen.axis(tokens.weight), seen.axis(others.weight)) == (0, None)


def test_a_table_that_is_given_ids_and_looks_up_positions_is_none():
    class Positions(nn.Embedding):  # like BART's
        def forward(self, ids):
            return super().forward(torch.arange(ids.shape[1]).expand(len(ids), -1) + 2)

    places = Positions(7, 2)
    with TokenTables(token_ids(IDS)) as seen:
        places(IDS)
    assert seen.axis(places.weight) is None


def test_token_ids_are_whole_numbers_by_samples_and_tokens_a_decoders_first():
    other = IDS.flip(0)
    mask = torch.ones_like(IDS)
    batch = {"attention_mask": mask, "labels": IDS, "x": IDS.float(), "input_ids": IDS, "decoder_input_ids": other}
    found = token_ids(batch)
    assert list(found) == ["decoder_input_ids", "input_ids"]
    assert found["decoder_input_ids"] is other
    assert list(token_ids((IDS.float(), IDS, IDS[0]))) == [1]


def test_a_model_names_its_embedding_or_does_not():
    class Named(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def get_input_embeddings(self):
            if self.own is NotImplementedError:
                raise NotImplementedError
            return self.own

    layer = nn.Linear(2, 2)
    assert named_embedding(Named(layer)) is layer
    assert named_embedding(Named(NotImplementedError)) is None
    assert named_embedding(Named("tokens")) is None
