"""Seeds of random draws that depend on what is drawn, so that no random state has to be saved."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str | None) -> int:
    """Return a seed of 63 bits that depends on every part and its position; equal parts give equal seeds everywhere.

    Args:
        *parts: what the draw is for, for example the run's seed, the name of the draw and a sample's time.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
