"""Seeds of random draws that depend on what is drawn, so that no random state has to be saved."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str | None) -> int:
    """Return a seed from 0 to 2^63 - 1 that depends on the value and position of every part.

    Equal parts give equal seeds on every machine and in every process.

    Args:
        *parts: values that identify the draw, for example the run's seed, the name of the draw and a sample's time.
    """
    # Not `hash`, which differs from process to process for text. The shift clears the sign bit of a 64-bit integer.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
