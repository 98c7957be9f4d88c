"""What a server does once it is ready."""

import gc

from dsv4cli.engine.server.warm import spare_what_is_there


def test_the_collector_looks_at_what_comes_later():
    there = len(gc.get_objects())
    try:
        spare_what_is_there()
        assert gc.get_freeze_count() > there / 2
        assert len(gc.get_objects()) < there / 10
    finally:
        gc.unfreeze()
