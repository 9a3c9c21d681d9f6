"""Base class of every config section, and the types of values that several sections share.

The validators of the sections raise ValueError for an invalid value. Pydantic collects these errors, and
`credit.config.load` reports all of them in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    field_validator,
    model_validator,
)

from credit.calendar import format_duration, parse_duration
from credit.errors import ConfigError
from credit.utils.paths import expand_home


def standardise_duration(value: object) -> object:
    """Return a duration in its standard spelling (``24h`` for ``1d``), so that configs with equal durations are equal.

    Args:
        value: duration string or number of hours; a value of any other type is returned unchanged, and pydantic reports
            it.

    Raises:
        ValueError: if the string or number is not a duration.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        # Pydantic reports the wrong type.
        return value
    try:
        return format_duration(parse_duration(value))
    except ConfigError as error:
        # Remove the key at the beginning of the message, because pydantic also adds the key.
        _, rule = str(error).split(": ", 1)
        raise ValueError(rule) from error


# A path string. Only this validator expands `~` in paths of the config.
PathText = Annotated[str, AfterValidator(expand_home)]
# A duration string, such as "6h"; a number alone means hours.
Duration = Annotated[str, BeforeValidator(standardise_duration)]
# An hour of the day, UTC.
Hour = Annotated[int, Field(ge=0, le=23)]


class StrictModel(BaseModel):
    """Base class of the config sections: sections are immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _require_no_bool_as_number(cls, values: Any, validate: ModelWrapValidatorHandler) -> Any:
        """Raise an error for ``yes`` or ``true`` if a key must be a number, because pydantic would read it as 1.

        Args:
            values: keys and values of the section, not yet validated.
            validate: validator of pydantic for the section.
        """
        section = validate(values)
        if not isinstance(values, Mapping):
            return section
        for key, value in values.items():
            if isinstance(value, bool) and not _accepts_bool(cls.model_fields[key].annotation):
                raise ValueError(f"{key}: {str(value).lower()} is not a value of this key; write a number")
        return section


def _accepts_bool(annotation: Any) -> bool:
    """Return True if a type allows the values true and false."""
    if annotation in (bool, Any):
        return True
    # The arguments of a Literal are values; the arguments of any other type are types.
    return any(isinstance(argument, bool) or _accepts_bool(argument) for argument in get_args(annotation))


def list_section_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes inside a type such as ``list[SourceConfig]`` or ``PaddingConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    sections: list[type[BaseModel]] = []
    for argument in get_args(annotation):
        sections += list_section_classes(argument)
    return sections


class DomainConfig(StrictModel):
    """Numbers of parts into which each field is divided."""

    lat: int = Field(1, ge=1, description="Number of parts of the latitude rows.")
    lon: int = Field(1, ge=1, description="Number of parts of the longitude columns.")


class DomainSection(StrictModel):
    """Base class of sections with the key `domain`, which divides the fields among ranks."""

    domain: int | DomainConfig = Field(
        1,
        description="Number of ranks among which the fields of one sample or forecast are divided. Each rank computes "
        "one part of the grid. `{lat: M, lon: N}` sets the numbers of parts of rows and columns; with a single "
        "number, the parts are chosen so that the ranks have equal work.",
    )

    @field_validator("domain")
    @classmethod
    def _require_positive(cls, domain: int | DomainConfig) -> int | DomainConfig:
        """Raise ValueError if the number of ranks is below 1."""
        if isinstance(domain, int) and domain < 1:
            raise ValueError("must be 1 or more")
        return domain

    @property
    def num_domain_ranks(self) -> int:
        """Number of ranks among which the fields are divided."""
        if isinstance(self.domain, DomainConfig):
            return self.domain.lat * self.domain.lon
        return self.domain

    @property
    def domain_parts(self) -> tuple[int, int] | None:
        """Numbers of parts of the latitude rows and longitude columns; None to choose these numbers automatically."""
        if isinstance(self.domain, DomainConfig):
            return self.domain.lat, self.domain.lon
        return None
