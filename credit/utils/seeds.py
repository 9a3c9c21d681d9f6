"""Seeds of random draws that depend on what is drawn, so that no random state has to be saved."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str | None) -> int:
    """Return a 63-bit seed that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
