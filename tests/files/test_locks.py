import errno
import re
import subprocess
import sys

import pytest

from semdiag_files import InputError, RunLock

HOLD = "import sys, pathlib; from semdiag_files import RunLock; "
HOLD += "lock = RunLock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock until it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_held_by_another_process_is_refused_until_that_is_killed(holder, tmp_path):
    with pytest.raises(InputError, match=r"is in use: another process trains there\. Wait for it, or choose"):
        RunLock(tmp_path)
    assert holder.poll() is None
    holder.kill()  # SIGKILL: nothing is tidied
    holder.wait()
    assert (tmp_path / ".lock").exists()
    RunLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_letting_go_twice_takes_nothing_from_the_next(tmp_path):
    first = RunLock(tmp_path)
    first.release()
    second = RunLock(tmp_path)
    first.release()
    assert (tmp_path / ".lock").exists()
    with pytest.raises(InputError, match="in use"):
        RunLock(tmp_path)
    second.release()


@pytest.mark.parametrize("number", ["ENOLCK", "EOPNOTSUPP", "EINVAL"])
def test_a_file_system_without_locks_is_used_with_a_remark(number, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(getattr(errno, number), "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.warns(UserWarning, match=re.escape(f"{tmp_path / 'r'} has no locks")):
        lock = RunLock(tmp_path, "r")
    said = []
    RunLock(tmp_path, say=said.append).release()
    assert len(said) == 1
    lock.release()
    assert not list(tmp_path.iterdir())


def test_what_is_no_lack_of_locks_names_the_file(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        RunLock(tmp_path)
    assert raised.value.filename == str(tmp_path / ".lock")
