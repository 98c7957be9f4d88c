"""Files of API keys: what they say, and what is refused."""

import pytest

from dsv4cli.engine.server.api_keys import ApiKey, read_keys
from dsv4cli.errors import UsageError


def test_keys_are_read_from_a_file(tmp_path):
    (tmp_path / "keys").write_text("first-key\n\nsecond-key\n")
    assert read_keys(tmp_path / "keys") == (ApiKey("key-1", b"first-key"), ApiKey("key-3", b"second-key"))


@pytest.mark.parametrize("content", ["", "\n", "short", "schl\u00fcssel-lang", "two-keys in-a-line", "# a comment"])
def test_what_is_no_key_is_refused(tmp_path, content):
    (tmp_path / "keys").write_text(content, "utf-8")
    with pytest.raises(UsageError, match="key") as error:
        read_keys(tmp_path / "keys")
    assert "openssl rand" in error.value.remedy
    assert not content.strip() or ">" not in error.value.remedy  # keys that are there stay


def test_the_line_of_a_wrong_key_is_named(tmp_path):
    (tmp_path / "keys").write_text("first-key\n\nshort\n")
    with pytest.raises(UsageError, match=r"line 3 of .*keys: a key must have"):
        read_keys(tmp_path / "keys")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "keys")


def test_a_line_has_a_name_and_limits(tmp_path):
    (tmp_path / "keys").write_text("# ours\nfirst-key tokens=1000 name=alice-2\n second-key\trequests=60\r\n  # end\n")
    assert read_keys(tmp_path / "keys") == (
        ApiKey("alice-2", b"first-key", tokens=1000),
        ApiKey("key-3", b"second-key", requests=60),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("first-key name=", r"name= in line 1 of .* is not a name"),
        ("first-key name=a,b", "is not a name"),
        ("first-key name=" + 65 * "a", "is not a name"),
        ("first-key name=\u00e4", "is not a name"),
        ("first-key name=a name=b", "one each of name=, requests= and tokens="),
        ("first-key limit=3", "one each of name="),
        ("first-key requests=0", r"requests= in line 1 of .* is not a number per minute"),
        ("first-key requests=-1", "not a number per minute"),
        ("first-key tokens=1e3", "not a number per minute"),
        ("first-key tokens=" + 5000 * "9", "not a number per minute"),
        ("first-key\n\nfirst-key", "lines 1 and 3 of .* have the same key"),
        ("first-key name=key-2\nsecond-key", "lines 1 and 2 of .* have the same name"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_without_its_key(tmp_path, content, message):
    (tmp_path / "keys").write_text(content, "utf-8")
    with pytest.raises(UsageError, match=message) as error:
        read_keys(tmp_path / "keys")
    assert "first-key" not in error.value.message + error.value.remedy
