"""Sealed reasoning: it opens where it was sealed, and nowhere else."""

import base64

import pytest

from dsv4cli.engine.server.response_seal import Seal


@pytest.mark.parametrize("text", ["", "a", "思考 \n" * 1000])
def test_what_is_sealed_opens(text):
    seal = Seal()
    token = seal.close(text)
    assert seal.open(token) == text
    assert seal.close(text) != token
    assert token.isascii()


def test_nothing_else_opens():
    seal = Seal()
    content = bytearray(base64.urlsafe_b64decode(seal.close("secret")))
    assert b"secret" not in content
    for at in range(len(content)):
        changed = content.copy()
        changed[at] ^= 1
        assert seal.open(base64.urlsafe_b64encode(changed).decode()) is None
    for token in ("", "x", "é", "gAAAA", base64.urlsafe_b64encode(content[:-1]).decode(), Seal().close("secret")):
        assert seal.open(token) is None
