"""What happens to an earlier report, and to other people's folders, when a report is written."""

from pathlib import Path

import pytest

from semdiag.measuring.findings.findings import Findings
from semdiag.reporting import report as report_module
from semdiag.reporting.folder import MARKER, check_folder, reserved
from semdiag.reporting.report import write_report
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


def test_a_folder_that_another_process_writes_is_left_alone(one, tmp_path):
    building = tmp_path / ".r.partial"
    building.mkdir()
    (building / MARKER).touch()
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


def tree(folder):
    """Every file below a folder, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def report_at(folder, **files):
    """A report of two files, written as the real one is."""
    with reserved(folder, False) as report, report.replacing() as building:
        (building / "data").mkdir()
        (building / "summary.json").write_text('{"schema": "semdiag.report/1"}')
        (building / "data" / "a.csv").write_text(files.get("data", "x"))
    return folder


@pytest.mark.parametrize("name", [".r.old", ".r.partial"])
@pytest.mark.parametrize("there", [False, True], ids=["no report", "a report"])
def test_folders_of_the_user_with_names_of_scraps_are_left_alone(name, there, tmp_path):
    if there:
        report_at(tmp_path / "r")
    (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / name / "deep" / "thesis.txt").write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(InputError, match=rf"{name} is in the way, and semdiag did not make it\. Move it, or"):
        check_folder(tmp_path / "r", False)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", [".r.old", ".r.partial"])
def test_files_and_links_with_names_of_scraps_are_left_alone(name, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MARKER).touch()
    for make in (lambda path: path.write_text("mine"), lambda path: path.symlink_to(tmp_path / "mine")):
        make(tmp_path / name)
        with pytest.raises(InputError, match="is in the way"):
            check_folder(tmp_path / "r", False)
        assert (tmp_path / name).exists()
        (tmp_path / name).unlink()
    assert (tmp_path / "mine" / MARKER).exists()


def test_scraps_of_a_killed_process_are_put_right(tmp_path):
    report_at(tmp_path / "r", data="old").rename(tmp_path / ".r.old")
    (tmp_path / ".r.partial").mkdir()  # killed before it was marked
    check_folder(tmp_path / "r", False)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    assert (tmp_path / "r" / "data" / "a.csv").read_text() == "old"


@pytest.mark.parametrize("place", ["notes.txt", "data/mine.csv", "figures/mine/a.png", ".git/HEAD"])
@pytest.mark.parametrize("marked", [True, False])
def test_files_that_the_user_put_into_a_report_are_not_lost(place, marked, tmp_path):
    folder = report_at(tmp_path / "r")
    if not marked:  # by an older version
        (folder / MARKER).unlink()
    (folder / place).parent.mkdir(exist_ok=True, parents=True)
    (folder / place).write_text("mine")
    if not marked and place.startswith(("data", "figures")):
        return  # which files were its own is unknown
    with pytest.raises(InputError, match=rf"holds {place if marked else place.split('/')[0]} beside an earlier"):
        check_folder(folder, False)
    (folder / place).unlink()
    if marked:
        assert tree(report_at(folder, data="new")).keys() == {MARKER, "summary.json", "data/a.csv"}


def test_what_systems_leave_in_folders_is_nobodys(tmp_path):
    folder = report_at(tmp_path / "r")
    (folder / "data" / ".DS_Store").touch()
    report_at(folder, data="new")
    assert (folder / "data" / "a.csv").read_text() == "new"


@pytest.mark.parametrize("place", ["/", "/proc", "/dev/shm"])
def test_roots_and_mounted_disks_are_refused_in_a_line(place):
    if not Path(place).is_mount():
        pytest.skip(f"{place} is no mount point here")
    with pytest.raises(InputError, match=rf"^The report cannot .* {place}, "):
        check_folder(Path(place), False)


def test_a_reserved_folder_is_refused_to_others_until_it_is_released(tmp_path):
    place = tmp_path / "reports" / "r"
    with reserved(place, False):
        with pytest.raises(InputError, match=r"r is in use: another process writes to it\."):
            check_folder(place, False)
        check_folder(place.with_name("s"), False)
    assert not list(tmp_path.iterdir())


def test_nothing_stays_of_a_reservation_that_fails(tmp_path):
    def fail():
        with reserved(tmp_path / "a" / "b" / "r", False) as report, report.replacing() as building:
            (building / "x").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())
