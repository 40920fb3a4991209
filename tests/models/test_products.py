"""oneDNN's products against float64."""

import pytest
import torch

from semdiag_models.attention import selection as products


@pytest.mark.processor
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_off_by_no_more_than_rounding(bias, onto, through_onednn):
    rows, width, outputs = 1500, 64, 96
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 2 * width, generator=generator)[:, ::2] for n in (rows, outputs))
    b, base = torch.randn(outputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    assert products.takes(x, weight)
    found = products.linear(x, weight, b if bias else None, base if onto else None)
    exact = x.double() @ weight.double().T + bias * b + onto * base
    # Higham, Accuracy and Stability, eq. 3.5: a sum of n products is off by at most n u / (1 − n u) Σ |products|.
    n, u = width + 2, torch.finfo(torch.float32).eps / 2
    size = x.abs().double() @ weight.abs().double().T + bias * b.abs() + onto * base.abs()
    assert bool(((found - exact).abs() <= n * u / (1 - n * u) * size).all())
    assert found.dtype == torch.float32


def test_onednn_gets_weights_for_which_it_has_a_fast_kernel(through_onednn, monkeypatch):
    """Of rows with gaps its product takes a thousand times as long, which top-k training waited for."""
    given = []

    class Recording:
        @staticmethod
        def default(x, weight, *rest):
            given.append(weight)
            return through(x, weight, *rest)

    through = products._LINEAR.default
    x, side_by_side = torch.randn(256, 64), torch.randn(256, 192)
    expected = x @ side_by_side[:, :64].T
    monkeypatch.setattr(products, "_LINEAR", Recording)
    for weight in (side_by_side[:, :64], side_by_side[:, :64].T.contiguous().T):
        torch.testing.assert_close(products.linear(x, weight), expected, rtol=1e-4, atol=1e-4)
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for weight in given)
    assert len(given) == 2


def test_several_products_are_the_single_ones(through_onednn):
    x, weight, bias, base = (
        torch.randn(3, 500, 96),
        torch.randn(3, 64, 96),
        torch.randn(3, 64),
        torch.randn(3, 500, 64),
    )
    assert products.takes(x, weight)
    assert products.takes(x[0], weight[0])
    out = torch.empty_like(base)
    for b, o in ((None, None), (bias, None), (bias, base)):
        single = [
            products.linear(x[i], weight[i], None if b is None else b[i], None if o is None else o[i])
            for i in range(3)
        ]
        assert torch.equal(products.linear(x, weight, b, o), torch.stack(single))
        assert products.linear(x, weight, b, o, out) is out
        assert torch.equal(out, torch.stack(single))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(1500, 64, dtype=torch.float64), torch.ones(64, 64, dtype=torch.float64)),
        (torch.ones(1500, 64, device="meta"), torch.ones(64, 64, device="meta")),
        (torch.ones(10, 64), torch.ones(64, 64)),
    ],
    ids=["double", "other device", "small"],
)
def test_other_products_are_left_to_torch(x, weight, through_onednn):
    assert not products.takes(x, weight)


@pytest.mark.parametrize(
    ("vendor", "capability", "mkl", "pays"),
    [
        ("GenuineIntel", "AVX512", True, False),
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", True, False),
        ("GenuineIntel", "AVX2", False, True),
    ],
)
def test_torchs_products_are_kept_where_mkl_is_as_fast(vendor, capability, mkl, pays, monkeypatch):
    monkeypatch.setattr(products, "_LINEAR", object())
    monkeypatch.setattr(products, "made_by_intel", lambda: vendor == "GenuineIntel")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products._pays() == pays
    monkeypatch.setattr(products, "_PAYS", pays)
    assert products.takes(torch.ones(1500, 64), torch.ones(64, 64)) == pays


def test_a_torch_without_onednn_makes_all_products_itself(monkeypatch):
    monkeypatch.setattr(products, "_LINEAR", None)
    assert not products._pays()


def test_who_made_the_processor_is_read_or_asked(monkeypatch, tmp_path):
    said = tmp_path / "cpuinfo"
    said.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n", encoding="utf-8")
    assert products.made_by_intel(said)
    said.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n", encoding="utf-8")
    assert not products.made_by_intel(said)
    monkeypatch.setattr(products.platform, "processor", lambda: "Intel64 Family 6 Model 142, GenuineIntel")
    assert products.made_by_intel(tmp_path / "missing")
