"""What happens to an earlier report, and to other people's folders, when a report is written."""

from pathlib import Path

import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.reporting import report as report_module
from semdiag.reporting.report import check_folder, write_report
from semdiag_files import InputError, RunLock

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def one(model):
    return model("topk")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_folder_that_another_process_writes_is_left_alone(one, tmp_path):
    building = tmp_path / ".r.partial"
    building.mkdir()
    lock = RunLock(tmp_path, "r")
    try:
        for refused in (check_folder, lambda folder, keep: write_report(Findings(one), folder, "x", formats=())):
            with pytest.raises(InputError, match=r"r is in use: another process writes to it\."):
                refused(tmp_path / "r", False)
            assert building.is_dir()
    finally:
        lock.release()
    check_folder(tmp_path / "r", False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_failing_swap_puts_the_old_report_back(one, tmp_path, monkeypatch):
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


@pytest.mark.slow
def test_a_link_to_a_report_stays_a_link(one, tmp_path):
    write_report(Findings(one), tmp_path / "there" / "r", "old", formats=())
    (tmp_path / "link").symlink_to(tmp_path / "there" / "r")
    write_report(Findings(one), tmp_path / "link", "new", formats=())
    assert (tmp_path / "link").is_symlink()
    assert "new" in (tmp_path / "there" / "r" / "index.html").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["r"]
    assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}


@pytest.mark.slow
def test_a_report_replaces_a_report_whole(one, tmp_path):
    write_report(Findings(one), tmp_path / "r", "old", formats=["svg"], sections=["learning"])
    write_report(Findings(one), tmp_path / "r", "new", formats=["png"], sections=["learning"])
    assert not list((tmp_path / "r").rglob("*.svg"))
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_empty_folder_is_used_and_no_models_are_refused(one, tmp_path):
    (tmp_path / "r").mkdir()
    assert write_report(Findings(one), tmp_path / "r", "x", formats=())[0] == tmp_path / "r" / "index.html"
    with pytest.raises(InputError, match="no model"):
        write_report(Findings(one.replace(models=one.models.iloc[:0])), tmp_path / "x", "x")
