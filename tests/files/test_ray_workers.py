"""Ray's workers: clusters that cannot be reached, die or have no room are said, and never waited for."""

import threading
import time
from types import SimpleNamespace

import pytest

from semdiag_files import InputError, workers
from semdiag_files.workers import RayWorkers, _Heartbeat

HERE = "a1"
NODE = {"NodeID": HERE, "Alive": True, "Resources": {"CPU": 2.0}}


def heartbeat(monkeypatch, nodes, **needs):
    """A heartbeat that asks a stand-in for a cluster without waiting."""
    monkeypatch.setattr(workers, "_HEARTBEAT", 0.0)
    context = SimpleNamespace(get_node_id=lambda: HERE)
    return _Heartbeat(SimpleNamespace(nodes=nodes, get_runtime_context=lambda: context), {"CPU": 1.0} | needs)


def asked(nodes):
    """A function that answers with nodes, and an event that says it has."""
    answered = threading.Event()
    calls = []

    def answer():
        calls.append(1)
        if len(calls) > 1:  # the first answer has been noted
            answered.set()
            time.sleep(0.01)
        return nodes

    return answer, answered


@pytest.mark.parametrize("nodes", [[], [NODE | {"Alive": False}], [NODE | {"NodeID": "b2"}]])
def test_a_dead_node_ends_the_wait(monkeypatch, nodes):
    answer, answered = asked(nodes)
    beat = heartbeat(monkeypatch, answer)
    assert answered.wait(10)
    with pytest.raises(InputError, match="The Ray cluster died"):
        beat.check()
    beat.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_cluster_that_does_not_answer_is_dead_after_many_checks_of_it(monkeypatch, fails):
    monkeypatch.setattr(workers, "_MOST_UNANSWERED", 3)
    forever = threading.Event()

    def nodes():
        if fails:
            raise ConnectionError
        forever.wait()

    beat = heartbeat(monkeypatch, nodes)
    for _ in range(3):
        beat.check()
    with pytest.raises(InputError, match="does not answer"):
        beat.check()
    beat.close()
    forever.set()


def test_a_living_cluster_is_left_alone_and_one_without_room_is_said_once(monkeypatch, recwarn):
    answer, answered = asked([NODE])
    beat = heartbeat(monkeypatch, answer)
    assert answered.wait(10)
    for _ in range(3 * workers._MOST_UNANSWERED):
        beat.check()
        beat._unanswered = 0  # as every answer does
    beat.close()
    assert not recwarn.list
    answer, answered = asked([NODE])
    beat = heartbeat(monkeypatch, answer, GPU=0.5)
    assert answered.wait(10)
    for _ in range(3):
        beat.check()
    beat.close()
    (warning,) = recwarn.list
    assert "no node of the Ray cluster has 1 CPU and 0.5 GPU" in str(warning.message)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "nowhere.invalid:6379", "localhost:99999", "x:y:z"])
def test_an_address_without_a_cluster_is_refused_in_seconds(address):
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    with pytest.raises(InputError, match="No Ray cluster at ") as refused:
        RayWorkers(address, 0.0, 1, len)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("error", [Exception("The node\ntimed out during startup"), SystemExit(1), TimeoutError()])
def test_whatever_ray_raises_as_it_starts_is_one_line(monkeypatch, error):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

    def init(**options):
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(InputError, match="No Ray cluster at auto") as refused:
        RayWorkers("auto", 0.0, 1, len)
    assert "\n" not in str(refused.value)
