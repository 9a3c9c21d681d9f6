"""Fields of an ensemble: statistics of the members, probabilities of events, quantiles.

Shape suffixes: M members, Q quantiles, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import operator
import re
from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from credit.data.formats.units import find_conversion
from credit.errors import ConfigError, DataError
from credit.forecast.io.schema import MEMBER
from credit.products.base import FieldProduct, FieldReader, ProductContext, derive_info, register_product
from credit.products.description import FieldInfo
from credit.products.section import MemberStatisticSection, ProbabilitySection, QuantilesSection

# Kind of product -> CF cell method.
_CELL_METHODS = {"mean": "mean", "spread": "standard_deviation", "minimum": "minimum", "maximum": "maximum"}
_COMPARISONS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}
_SIGNS = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}
# A limit with units, such as "15 m s-1": the number is the first group, the units are the second.
_LIMIT = re.compile(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![0-9.])\s*(.*?)\s*")
# Number of rows in a block. Reducing block by block avoids float64 copies of all members of a complete field.
_ROWS_AT_ONCE = 32


def find_field_with_members(context: ProductContext, name: str) -> FieldInfo:
    """Return the description of a field with ensemble members, found by its name.

    Args:
        context: description of the forecasts and the earlier products.
        name: name of a channel or of an earlier product.

    Raises:
        ConfigError: if there is no field of this name, or the field has no members.
    """
    info = context.find_field(name)
    if info.dim != MEMBER:
        raise ConfigError(
            f"{context.key}.of: {name} has no members; this product needs forecasts with inference.ensemble, and a "
            "field with a value for each member"
        )
    return info


def reduce_members(fields_MHW: np.ndarray, reduce: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Reduce the members of a field with a function that is applied to one block of rows after another.

    Args:
        fields_MHW: field with M members.
        reduce: function of a block of rows (M, h, W) that returns (h, W) or (Q, h, W).

    Returns:
        (1, H, W) or (Q, H, W) float32.
    """
    blocks = []
    for start in range(0, fields_MHW.shape[1], _ROWS_AT_ONCE):
        block = reduce(fields_MHW[:, start : start + _ROWS_AT_ONCE])
        blocks.append(block.reshape(-1, *block.shape[-2:]).astype(np.float32))
    return np.concatenate(blocks, axis=1)


def compute_member_statistic(fields_MHW: np.ndarray, statistic: str) -> np.ndarray:
    """Return the ``mean``, ``spread``, ``minimum`` or ``maximum`` of the members, (H, W); NaN where a member is NaN.

    Args:
        fields_MHW: field with M members; M must be at least 2 for the spread.
        statistic: name of the statistic. The spread is the standard deviation with the divisor M - 1.
    """
    if statistic == "mean":
        return fields_MHW.mean(axis=0, dtype=np.float64)
    if statistic == "spread":
        return fields_MHW.std(axis=0, ddof=1, dtype=np.float64)
    if statistic == "minimum":
        return fields_MHW.min(axis=0)
    return fields_MHW.max(axis=0)


class _MemberProduct(FieldProduct):
    """Base class of products that reduce the members of a field, such as a mean or a probability."""

    def __init__(
        self, section: MemberStatisticSection | ProbabilitySection | QuantilesSection, context: ProductContext
    ) -> None:
        super().__init__(section, context)
        self.inputs = (section.of,)
        self._input_info = find_field_with_members(context, section.of)

    def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
        """Return the reduced members at a lead time, (1, H, W), or (Q, H, W) for quantiles."""
        return reduce_members(fields.read(self.inputs[0], lead_index), self.reduce)

    @abstractmethod
    def reduce(self, fields_MHW: np.ndarray) -> np.ndarray:
        """Reduce the members in a block of h rows, (M, h, W), and return (h, W), or (Q, h, W) for quantiles."""


@register_product("mean", MemberStatisticSection)
@register_product("spread", MemberStatisticSection)
@register_product("minimum", MemberStatisticSection)
@register_product("maximum", MemberStatisticSection)
class MemberStatistic(_MemberProduct):
    """Mean, spread, minimum or maximum of the members."""

    def __init__(self, section: MemberStatisticSection, context: ProductContext) -> None:
        super().__init__(section, context)
        if section.kind == "spread" and len(self._input_info.coordinate) < 2:
            raise ConfigError(f"{context.key}.of: {section.of} has one member; a spread needs at least two")
        self.info = derive_info(
            self._input_info,
            section.name,
            long_name=f"{section.kind} of the members of {self._input_info.title}",
            dim=None,
            coordinate=(),
            statistic=_CELL_METHODS[section.kind],
        )

    def reduce(self, fields_MHW: np.ndarray) -> np.ndarray:
        """Return the statistic of the members in a block of h rows, (h, W)."""
        return compute_member_statistic(fields_MHW, self.section.kind)


@register_product("probability", ProbabilitySection)
class Probability(_MemberProduct):
    """Probability of an event: the fraction of members for which the event happens."""

    def __init__(self, section: ProbabilitySection, context: ProductContext) -> None:
        super().__init__(section, context)
        limits = {
            "above": section.above,
            "at_least": section.at_least,
            "below": section.below,
            "at_most": section.at_most,
        }
        # The section has exactly one limit that is not None.
        key, limit = next((key, limit) for key, limit in limits.items() if limit is not None)
        value = parse_limit(limit, self._input_info, f"{context.key}.{key}")
        self._comparison = _COMPARISONS[key]
        # The limit is rounded to float32 like the fields, so that a value equal to the limit also compares as equal.
        self._limit = np.float32(value)
        # The long name shows the limit as written in the config.
        limit_text = limit if isinstance(limit, str) else f"{limit:g} {self._input_info.units}".rstrip()
        text = f"{self._input_info.title} {_SIGNS[key]} {limit_text}"
        self.info = derive_info(
            self._input_info,
            section.name,
            units="1",
            standard_name="",
            long_name=f"probability of {text}",
            dim=None,
            coordinate=(),
            is_probability=True,
        )

    def reduce(self, fields_MHW: np.ndarray) -> np.ndarray:
        """Return the probability of the event in a block of h rows, (h, W)."""
        return compute_event_probability(fields_MHW, self._comparison, self._limit)


def compute_event_probability(
    fields_MHW: np.ndarray, comparison: Callable[[np.ndarray, np.float32], np.ndarray], limit: np.float32
) -> np.ndarray:
    """Return the fraction of members for which a comparison with a limit is true, (H, W); NaN where a member is NaN.

    Args:
        fields_MHW: field with M members.
        comparison: function of the members and the limit that returns a boolean array, such as `operator.gt`.
        limit: the limit in the units of the field.
    """
    probability_HW = comparison(fields_MHW, limit).mean(axis=0)
    return np.where(np.isnan(fields_MHW).any(axis=0), np.nan, probability_HW)


def parse_limit(limit: float | str, info: FieldInfo, key: str) -> float:
    """Return a limit in the units of a field.

    Args:
        limit: a number in the units of the field, or a string with a number and units.
        info: description of the field.
        key: config key of the limit, for messages.

    Raises:
        ConfigError: if the string is not a number with units, or the units cannot be converted to those of the field.
    """
    if not isinstance(limit, str):
        return float(limit)
    match = _LIMIT.fullmatch(limit)
    if match is None:
        raise ConfigError(f'{key}: "{limit}" is not a limit; write a number, or a number with units such as 15 m s-1')
    value = float(match[1])
    if not match[2]:
        return value
    try:
        conversion = find_conversion(match[2], info.units, "the limit", f"the products of {info.name}", key)
    except DataError as error:
        raise ConfigError(
            f'{key}: "{limit}" cannot be compared with {info.name}, which is in "{info.units}"; write the limit in '
            "units of the same quantity"
        ) from error
    if conversion is not None:
        value = value * conversion.scale + conversion.offset
    return value


@register_product("quantiles", QuantilesSection)
class Quantiles(_MemberProduct):
    """Quantiles of the members, linearly interpolated between the sorted members."""

    def __init__(self, section: QuantilesSection, context: ProductContext) -> None:
        super().__init__(section, context)
        self.info = derive_info(
            self._input_info,
            section.name,
            long_name=f"quantiles of the members of {self._input_info.title}",
            dim="quantile",
            coordinate=tuple(section.quantiles),
        )

    def reduce(self, fields_MHW: np.ndarray) -> np.ndarray:
        """Return the quantiles of the members in a block of h rows, (Q, h, W)."""
        return np.quantile(fields_MHW.astype(np.float64), self.section.quantiles, axis=0)
