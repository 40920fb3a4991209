"""What happens to an earlier report, and to other people's folders, when a report is written."""

from pathlib import Path

import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.reporting import report as folder_module
from semdiag.reporting import report as report_module
from semdiag.reporting.report import exchange, write_report
from semdiag_models import InputError

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def one(model):
    return model("topk")


def test_a_failure_leaves_the_old_report_and_no_scraps(one, tmp_path, monkeypatch):
    page, _ = write_report(Findings(one), tmp_path / "r", "old", formats=())
    before = page.read_bytes()

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_module, "render_page", fail)
    with pytest.raises(InputError, match="No space left on device"):
        write_report(Findings(one), tmp_path / "r", "new", formats=())
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def fail_to_exchange(monkeypatch):
    """Make this system one that cannot, as Windows and some file systems."""
    monkeypatch.setattr(folder_module, "exchange", lambda one, other: False)


def test_a_failing_swap_puts_the_old_report_back(one, tmp_path, monkeypatch):
    fail_to_exchange(monkeypatch)
    page, _ = write_report(Findings(one), tmp_path / "r", "old", formats=())
    rename = Path.rename

    def fail(self, target):
        if self.suffix == ".partial":
            raise OSError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="Permission denied"):
        write_report(Findings(one), tmp_path / "r", "new", formats=())
    assert "old" in page.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_two_folders_change_places_or_nothing_does(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (one / "file").write_text("first")
    assert not exchange(one, other)
    assert (one / "file").read_text() == "first"
    other.mkdir()
    done = exchange(one, other)
    assert [path.name for path in (other if done else one).iterdir()] == ["file"]
    assert not list((one if done else other).iterdir())


def test_where_the_system_can_no_moment_is_without_a_report(one, tmp_path, monkeypatch):
    probes = [tmp_path / name for name in ("a", "b")]
    for probe in probes:
        probe.mkdir()
    if not exchange(*probes):
        pytest.skip("this system or file system cannot exchange two folders")
    write_report(Findings(one), tmp_path / "r", "old", formats=())
    monkeypatch.setattr(Path, "rename", lambda self, target: pytest.fail(f"{self} was renamed to {target}"))
    page, _ = write_report(Findings(one), tmp_path / "r", "new", formats=())
    assert "new" in page.read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "r"}


@pytest.mark.parametrize("can", [True, False], ids=["exchanged", "renamed"])
def test_a_link_to_a_report_stays_a_link(can, one, tmp_path, monkeypatch):
    if not can:
        fail_to_exchange(monkeypatch)
    write_report(Findings(one), tmp_path / "there" / "r", "old", formats=())
    (tmp_path / "link").symlink_to(tmp_path / "there" / "r")
    write_report(Findings(one), tmp_path / "link", "new", formats=())
    assert (tmp_path / "link").is_symlink()
    assert "new" in (tmp_path / "there" / "r" / "index.html").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["r"]
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}


@pytest.mark.parametrize("can", [True, False], ids=["exchanged", "renamed"])
def test_a_report_replaces_a_report_whole(can, one, tmp_path, monkeypatch):
    if not can:
        fail_to_exchange(monkeypatch)
    write_report(Findings(one), tmp_path / "r", "old", formats=["svg"], sections=["learning"])
    write_report(Findings(one), tmp_path / "r", "new", formats=["png"], sections=["learning"])
    assert not list((tmp_path / "r").rglob("*.svg"))
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_other_peoples_folders_are_refused(one, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not empty and not a semdiag report"):
        write_report(Findings(one), tmp_path, "x")
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(InputError, match="not empty and not a semdiag report"):
        write_report(Findings(one), tmp_path, "x")
    with pytest.raises(InputError, match="is a file"):
        write_report(Findings(one), tmp_path / "thesis.txt", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "thesis.txt"]


def test_an_empty_folder_is_used_and_no_models_are_refused(one, tmp_path):
    (tmp_path / "r").mkdir()
    assert write_report(Findings(one), tmp_path / "r", "x", formats=())[0] == tmp_path / "r" / "index.html"
    with pytest.raises(InputError, match="no model"):
        write_report(Findings(one.replace(models=one.models.iloc[:0])), tmp_path / "x", "x")
