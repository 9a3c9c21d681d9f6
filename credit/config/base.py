"""What every section of the config shares: frozen, and an unknown key is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from credit.paths import expand_home

# The type of every key that holds a path: `~` is expanded here and nowhere else.
PathText = Annotated[str, AfterValidator(expand_home)]


class Section(BaseModel):
    """A section of the config; immutable, strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
