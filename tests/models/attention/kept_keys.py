"""What the functions in the table of kinds keep, and vectors to try them with."""

from types import SimpleNamespace
from unittest import mock

import torch

from semdiag_models import ModelConfig
from semdiag_models import selection as module
from semdiag_models.selection import SELECTORS


def select_keys(
    kind,
    k,
    q,
    keys,
    scale,
    valid,
    everywhere=(0, 0),
    cls_hidden=False,
    fast=True,
    centroids=None,
    planes=None,
    indexer=None,
    **fields,
):
    """What the kind's function in the table keeps, in a layer with these properties."""
    _, heads, length, width = q.shape
    select = SELECTORS.get(kind)
    sizes = {"heads": heads, "head_width": width, "blocks": 1}
    config = ModelConfig(3, 2, max(length, k or 1), kind, k, **sizes, **fields)
    layer = SimpleNamespace(
        config=config, layer=0, scale=scale, training=False, draw_seed=None, centroids=centroids,
        indexer=indexer,
        core=SimpleNamespace(everywhere=everywhere, cls_hidden=cls_hidden, fast=fast),
    )  # fmt: skip
    if planes is None:
        return None if select is None else select(q, keys, valid, layer)
    with mock.patch.object(module, "hash_directions", return_value=planes[None]):
        return select(q, keys, valid, layer)


def vectors(batch=3, heads=2, length=10, width=4):
    return torch.randn(2, batch, heads, length, width, dtype=torch.float64)
