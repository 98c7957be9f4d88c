"""What drafts have come to, counted: a whole engine's, and one turn's."""

from dsv4cli.engine.runtime.drafts.draft_report import DraftReport


def test_the_record_has_the_keys_of_the_documents():
    report = DraftReport("mtp", steps=10, drafted=24, accepted=15, per_position=[8, 5, 2], tokens=25)
    assert report.record() == {
        "drafter": "mtp",
        "steps": 10,
        "drafted": 24,
        "accepted": 15,
        "per_position": [8, 5, 2],
        "tokens_per_step": 2.5,
    }


def test_no_step_has_no_tokens_per_step():
    assert DraftReport("dspark").record()["tokens_per_step"] is None


def test_a_turn_is_what_came_since_the_report_before_it():
    before = DraftReport("mtp", steps=4, drafted=6, accepted=3, per_position=[2, 1], tokens=7)
    now = DraftReport("mtp", steps=10, drafted=24, accepted=15, per_position=[8, 5, 2], tokens=25)
    assert now.since(before) == DraftReport("mtp", steps=6, drafted=18, accepted=12, per_position=[6, 4, 2], tokens=18)
    assert now.since(None) == now
