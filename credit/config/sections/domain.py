"""The key ``domain`` of training and of forecasts: division of the fields among ranks."""

from __future__ import annotations

from pydantic import Field

from credit.config.sections.base import StrictModel


class DomainConfig(StrictModel):
    """Numbers of parts into which each field is divided."""

    lat: int = Field(1, ge=1, description="Number of parts of the latitude rows.")
    lon: int = Field(1, ge=1, description="Number of parts of the longitude columns.")


def count_domain_ranks(domain: int | DomainConfig) -> int:
    """Return the number of ranks that divide the fields among them."""
    if isinstance(domain, DomainConfig):
        return domain.lat * domain.lon
    return domain


def find_domain_parts(domain: int | DomainConfig) -> tuple[int, int] | None:
    """Return the numbers of parts of the latitude rows and of the longitude columns; None to have them chosen."""
    if isinstance(domain, DomainConfig):
        return domain.lat, domain.lon
    return None


def require_positive_domain(domain: int | DomainConfig, key: str) -> int | DomainConfig:
    """Return the value of a key ``domain``.

    Raises:
        ValueError: naming `key`, if it is a number below 1.
    """
    if isinstance(domain, int) and domain < 1:
        raise ValueError(f"{key}: {domain} must be 1 or more")
    return domain
