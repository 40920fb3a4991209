import pytest
import torch

from semdiag_files import InputError
from semdiag_models import train as device
from semdiag_models.train import find_device, with_float64


@pytest.fixture
def present(monkeypatch):
    """Call with which accelerators there are."""

    def pretend(cuda, mps):
        monkeypatch.setattr(device, "BEST", device.BEST[-3:])  # without that of SEMDIAG_SECOND_DEVICE=auto
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "best"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_is_the_fastest_device_present(present, cuda, mps, best):
    present(cuda, mps)
    assert find_device("auto").type == best


def test_a_device_is_found_by_name(present):
    present(True, True)
    assert [find_device(name).type for name in ("cpu", "cuda", "mps")] == ["cpu", "cuda", "mps"]


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_an_absent_device_is_refused_with_a_way_out(present, name):
    present(False, False)
    with pytest.raises(InputError, match=rf"^No {name} device here\. Use --device auto or --device cpu\.$"):
        find_device(name)


def test_an_unknown_device_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"Unknown device 'cuda0'\. Did you mean 'cuda'"):
        find_device("cuda0")


def test_float64_is_measured_on_the_cpu_where_mps_is_asked_for():
    assert [with_float64(name) for name in ("mps", "cuda:1", torch.device("cpu"))] == [
        *map(torch.device, ("cpu", "cuda:1", "cpu"))
    ]
