"""Sealed reasoning of the Responses API: opaque tokens that only this process can open. No torch.

A token is `version ‖ nonce ‖ ciphertext ‖ tag` in URL-safe base64. The ciphertext is the UTF-8 text XORed with
SHAKE-256(key ‖ nonce), and the tag is HMAC-SHA-256 of all bytes before it with a second key (encrypt-then-MAC). The
standard library has no AEAD cipher, and a keyed sponge is a pseudorandom function.
"""

import base64
import hashlib
import hmac
import secrets

VERSION = b"\x01"
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 32


class Seal:
    """Seals texts with random keys of this process. After a restart, tokens from before it cannot be opened."""

    def __init__(self) -> None:
        self._stream_key, self._tag_key = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)

    def close(self, text: str) -> str:
        """Return a token that carries a text. Two tokens of the same text differ."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = VERSION + nonce + self._apply_stream(nonce, text.encode())
        return base64.urlsafe_b64encode(sealed + self._tag(sealed)).decode()

    def open(self, token: str) -> str | None:
        """Return the text in a token, or None if this process has not sealed it or it was changed."""
        try:
            content = base64.b64decode(token, altchars=b"-_", validate=True)
        except ValueError:
            return None
        sealed, tag = content[:-TAG_BYTES], content[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(sealed)):
            return None
        begin = len(VERSION) + NONCE_BYTES
        return self._apply_stream(sealed[len(VERSION) : begin], sealed[begin:]).decode()

    def _apply_stream(self, nonce: bytes, content: bytes) -> bytes:
        """Encrypt or decrypt bytes: XOR with the keystream of a nonce."""
        size = len(content)
        stream = hashlib.shake_256(self._stream_key + nonce).digest(size)
        return (int.from_bytes(content) ^ int.from_bytes(stream)).to_bytes(size)

    def _tag(self, sealed: bytes) -> bytes:
        return hmac.digest(self._tag_key, sealed, "sha256")
