"""Seeds that depend on the purpose of the random numbers, so that no random state has to be saved."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str | None) -> int:
    """Return a seed from 0 to 2^63 - 1 that depends on the value and position of every part.

    Equal parts give equal seeds on every machine and in every process.

    Args:
        *parts: values that identify the random numbers, such as the seed of the run, their purpose and the time of a
            sample.
    """
    # `hash` is not used, because it returns different values for a string in different processes. The shift clears the
    # sign bit of a 64-bit integer.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
