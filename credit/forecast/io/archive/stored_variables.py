"""Common interface to the variables and attributes of netCDF files and zarr stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.errors import DataError


class StoredVariables:
    """Variables and attributes of a netCDF file or a zarr store.

    Args:
        origin: file, store or URL, for messages.
        variables: name -> variable of the netCDF4 library (for a file) or of xarray (for a store).
        attributes: global attributes.

    Attributes:
        names: names of all variables.
        attributes: global attributes; arrays are converted to lists.
    """

    def __init__(
        self,
        origin: Path | str,
        variables: Mapping[str, netCDF4.Variable] | Mapping[str, xr.Variable],
        attributes: Mapping[str, object],
    ) -> None:
        self.origin = origin
        self.names = list(variables)
        # Arrays are converted to lists, because comparing arrays with == gives no single truth value.
        self.attributes = {}
        for name, value in attributes.items():
            self.attributes[name] = value.tolist() if isinstance(value, np.ndarray) else value
        self._variables = variables

    @property
    def all_dims(self) -> list[str]:
        """Names of the dimensions of all variables, sorted."""
        dims: set[str] = set()
        for name in self.names:
            dims.update(self.dims(name))
        return sorted(dims)

    def values(self, name: str) -> np.ndarray:
        """Return all values of a variable.

        Raises:
            DataError: if the variable cannot be read.
        """
        try:
            return np.asarray(self._variables[name][...])
        except Exception as error:
            # Each file-system library has different exception classes.
            raise DataError(f"{self.origin}: {name} cannot be read ({error}); copy or forecast it again") from error

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the names of the dimensions of a variable."""
        variable = self._variables[name]
        if isinstance(variable, xr.Variable):
            return variable.dims
        return variable.dimensions

    def length(self, dim: str) -> int:
        """Return the length of a dimension."""
        name = next(name for name in self.names if dim in self.dims(name))
        return self._variables[name].shape[self.dims(name).index(dim)]

    def variable_attributes(self, name: str) -> dict:
        """Return the attributes of a variable."""
        variable = self._variables[name]
        if isinstance(variable, xr.Variable):
            return variable.attrs
        return variable.__dict__

    def auxiliary_names(self, name: str) -> list[str]:
        """Return the names of the auxiliary coordinates of a variable, from its attribute ``coordinates``."""
        variable = self._variables[name]
        listed = self.variable_attributes(name).get("coordinates", "")
        # xarray moves the attribute to the encoding when it decodes a variable.
        if isinstance(variable, xr.Variable) and not listed:
            listed = variable.encoding.get("coordinates") or ""
        return [coordinate for coordinate in str(listed).split() if coordinate in self.names]

    def coordinate(self, dim: str) -> xr.Variable | None:
        """Return the coordinate variable of a dimension; None if there is none."""
        if dim not in self.names or self.dims(dim) != (dim,):
            return None
        return xr.Variable((dim,), self.values(dim), self.variable_attributes(dim))

    def find_first(self, names: Iterable[str]) -> str:
        """Return the first name in `names` that is the name of a variable.

        Raises:
            DataError: if no variable has one of these names.
        """
        for name in names:
            if name in self.names:
                return name
        raise DataError(f"{self.origin}: has no coordinate {' or '.join(names)}")
