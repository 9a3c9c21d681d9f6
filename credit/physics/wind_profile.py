"""Wind speed between two heights in the surface layer."""

from __future__ import annotations

import numpy as np


def interpolate_power_law(lower: np.ndarray, upper: np.ndarray, heights: tuple[float, float, float]) -> np.ndarray:
    """Interpolate wind speed between two heights with the power law U(z) = U1 (z / z1)^a.

    The exponent a = ln(U2 / U1) / ln(z2 / z1) is computed from the two given speeds, so ln U is linear in ln z. Source:
    C. G. Justus and A. Mikhail (1976), Height variation of wind speed and wind distributions statistics, Geophys. Res.
    Lett. 3, 261, doi:10.1029/GL003i005p00261.

    Args:
        lower: wind speed at the lower height, at least 0, of any shape.
        upper: wind speed at the upper height, of the same shape and units.
        heights: (height of the result, lower height, upper height) in m; the height of the result is between the lower
            and the upper height.

    Returns:
        Wind speed, float64, in the units of the arguments; 0 if one of the two speeds is 0.
    """
    share = _compute_logarithmic_weight(heights)
    return np.asarray(lower, dtype=np.float64) ** (1.0 - share) * np.asarray(upper, dtype=np.float64) ** share


def interpolate_log_law(lower: np.ndarray, upper: np.ndarray, heights: tuple[float, float, float]) -> np.ndarray:
    """Interpolate wind speed between two heights with the logarithmic profile of neutral air: U is linear in ln z.

    The profile is U(z) = u* / k ln(z / z0). The two given speeds determine friction velocity u* and roughness length
    z0. Source: R. B. Stull (1988), An Introduction to Boundary Layer Meteorology, section 9.7,
    doi:10.1007/978-94-009-3027-8.

    Args:
        lower: wind speed at the lower height, of any shape.
        upper: wind speed at the upper height, of the same shape and units.
        heights: (height of the result, lower height, upper height) in m; the height of the result is between the lower
            and the upper height.

    Returns:
        Wind speed, float64, in the units of the arguments.
    """
    share = _compute_logarithmic_weight(heights)
    return (1.0 - share) * np.asarray(lower, dtype=np.float64) + share * np.asarray(upper, dtype=np.float64)


def _compute_logarithmic_weight(heights: tuple[float, float, float]) -> float:
    """Return ln(z / z1) / ln(z2 / z1) for the heights (z, z1, z2); it is 0 at the lower height z1 and 1 at z2."""
    height, lower, upper = heights
    return float(np.log(height / lower) / np.log(upper / lower))
