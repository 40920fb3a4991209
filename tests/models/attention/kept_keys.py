"""What the functions in the table of kinds keep, and vectors to try them with."""

from types import SimpleNamespace
from unittest import mock

import torch

from semdiag_models import ATTENTIONS, ModelConfig
from semdiag_models import attention as module


def select_keys(
    kind, k, q, keys, scale, valid, everywhere=(0, 0), apart=False, centroids=None, planes=None, **fields
):
    """What the kind's function in the table keeps, in a layer with these properties."""
    (_, heads, length, width), select = q.shape, ATTENTIONS[kind].select
    sizes = {"heads": heads, "head_width": width, "blocks": 1}
    config = ModelConfig(3, 2, max(length, k or 1), kind, k, **sizes, **fields)
    layer = SimpleNamespace(
        config=config, layer=0, scale=scale, training=False, draw_seed=None, centroids=centroids,
        core=SimpleNamespace(everywhere=everywhere, apart=apart),
    )  # fmt: skip
    if planes is None:
        return None if select is None else select(q, keys, valid, layer)
    with mock.patch.object(module, "hash_directions", return_value=planes[None]):
        return select(q, keys, valid, layer)


def vectors(batch=3, heads=2, length=10, width=4):
    return torch.randn(2, batch, heads, length, width, dtype=torch.float64)
