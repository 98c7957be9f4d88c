"""What a client wants answers to look like."""

from dsv4cli.engine.server.answer_format import with_schema
from dsv4cli.engine.text.reply_grammar import AnswerForm


def test_a_schema_joins_the_first_system_message_and_leaves_the_others():
    schema = {"type": "array"}
    user, system, last = ({"role": role, "content": role} for role in ("user", "system", "system"))
    found = with_schema([user, system, last], AnswerForm("json", schema))
    assert found == [user, {**system, "response_format": schema}, last]
    assert with_schema([user], AnswerForm("json", schema))[1:] == [user]
