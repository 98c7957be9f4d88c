"""`dsv4 inspect --template`: the chat template of the model's release."""

from typing import TYPE_CHECKING

from dsv4cli.harmless import brief_line
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.checkpoint.identify import Identity


def show_template(out: Output, identity: "Identity", name: str) -> bool:
    """Print the chat template of the release, and say on stderr if the model has a different one. Return True."""
    from dsv4cli.engine.text.chat_template import chat_template

    text, own = chat_template(identity.release), _own_template(identity)
    out.document({"release": identity.release, "text": text, "own": own and ("equal" if own == text else "different")})
    if own is not None and own != text:
        out.status(f"note: {brief_line(name)} has a chat template of its own, which differs from this one")
    out.stream(text)
    out.end_line()
    return True


def _own_template(identity: "Identity") -> str | None:
    from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
    from dsv4cli.engine.checkpoint.identify import FolderIdentity
    from dsv4cli.engine.conversion.chat_templates import own_template
    from dsv4cli.engine.conversion.gguf.vocabulary import TEMPLATE

    if isinstance(identity, GgufIdentity):
        found = identity.metadata.get(TEMPLATE)
        return found if isinstance(found, str) else None
    return own_template(identity.checkpoint.folder) if isinstance(identity, FolderIdentity) else None
