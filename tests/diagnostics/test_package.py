"""The package's names: explicit, and imported only when they are used."""

import subprocess
import sys

import pytest

import semdiag


def test_every_name_that_is_promised_is_there():
    assert dir(semdiag) == sorted(semdiag.__all__)
    for name in semdiag.__all__:
        assert getattr(semdiag, name).__name__ == name


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'semdiag' has no attribute 'lode'$"):
        _ = semdiag.lode


def test_importing_the_package_does_not_import_torch():
    code = "import semdiag, sys; print('torch' in sys.modules); semdiag.load; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8", timeout=60
    )
    assert done.stdout.split() == ["False", "True"]
