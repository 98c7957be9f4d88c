"""The layering stays as shallow as it is: 13 floors, 20 files and packages in the engine's loop."""

from tools.house import RUNTIME, floors, rooms


def test_the_packages_have_few_floors():
    floor = floors()
    assert max(floor.values()) <= 13
    assert floor["engine.model"] < floor["engine.runtime"] < floor["commands"] < floor["cli"]


def test_the_loop_is_seen_at_once():
    assert len(rooms(RUNTIME)) <= 20
    assert {"engine.py", "scheduler.py", "state", "graphs", "drafts", "pacing", "sampling"} <= {*rooms(RUNTIME)}
