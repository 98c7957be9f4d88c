"""`dsv4 verify` on servers that nobody here wrote: it names what docs/guides/verify.md lists, and nothing else.

Requires fastapi, uvicorn, openai and accelerate for transformers, and xllamacpp for llama.cpp.
"""

import pytest

from dsv4cli.engine.verification.plan import Scope
from tests.commands.verify.test_faults import checked
from tests.support.foreign_servers import llama_server, transformers_server

pytestmark = pytest.mark.slow
TRANSFORMERS = {
    "encoding.efforts", "encoding.thinking", "encoding.tool-results", "replies.efforts", "replies.reasoning",
    "replies.stop", "replies.temperature", "replies.stream", "tools.choice", "tools.leaks", "limits.fields",
    "limits.too-long",
}  # fmt: skip
LLAMA = {"replies.usage", "replies.messages", "replies.markup", "tools.choice", "tools.leaks", "limits.fields"}


@pytest.mark.parametrize(("serving", "wrong"), [(transformers_server, TRANSFORMERS), (llama_server, LLAMA)])
def test_failures_of_other_engines_are_those_in_the_guide(serving, wrong, tmp_path):
    with serving(tmp_path) as url:
        assert {*checked(url, Scope())} == wrong
