"""Base of every config section: frozen, and an unknown key is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator

from credit.utils.paths import expand_home

# The type of every key that holds a path: `~` is expanded here and nowhere else.
PathText = Annotated[str, AfterValidator(expand_home)]


class Section(BaseModel):
    """A section of the config; immutable, strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_truth_as_number(cls, given: Any, validate: ModelWrapValidatorHandler) -> Any:
        """Refuse ``yes`` or ``true`` for a number, which pydantic would take for 1."""
        section = validate(given)
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if isinstance(value, bool) and not _takes_truth(cls.model_fields[name].annotation):
                raise ValueError(f"{name}: {str(value).lower()} is no value of this key; write a number")
        return section


def _takes_truth(annotation: Any) -> bool:
    """Return whether a value of this type may be true or false."""
    if annotation in (bool, Any):
        return True
    return any(isinstance(item, bool) or _takes_truth(item) for item in get_args(annotation))
