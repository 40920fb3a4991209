import torch

from semdiag_models.listops import numpy_generator


def test_each_call_takes_a_fresh_seed_from_the_generator():
    generator = torch.Generator().manual_seed(0)
    first, second = (numpy_generator(generator).integers(2**60) for _ in range(2))
    assert first != second


def test_equal_torch_generators_give_equal_numpy_generators():
    one, same = (numpy_generator(torch.Generator().manual_seed(4)) for _ in range(2))
    assert one.integers(2**60, size=5).tolist() == same.integers(2**60, size=5).tolist()
