"""Choice of the trials of a sweep: all combinations of the values of a grid, or random values from ranges."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from credit.compare.runs import format_value
from credit.config.load import apply_overrides
from credit.errors import ConfigError

# Keys that must not vary between trials: the sweep sets them, or different values would make results incomparable.
_REFUSED_KEYS = ("save_loc", "experiment", "trainer.monitor")
_EXAMPLE_GRID = "trainer.learning_rate=1e-4,3e-4"
_EXAMPLE_RANGE = "trainer.learning_rate=log:1e-5,1e-3"


@dataclass(frozen=True)
class RandomRange:
    """Range from which a random search samples the values of a config key.

    Attributes:
        key: dotted key of the config.
        kind: ``log`` (uniform in the logarithm), ``uniform`` or ``choice``.
        values: lowest and highest value of the range; for ``choice``, all possible values.
    """

    key: str
    kind: str
    values: tuple[object, ...]

    def sample(self, rng: np.random.Generator) -> str:
        """Return a random value as a YAML string; a number of ``log`` or ``uniform`` is rounded to four digits.

        Args:
            rng: random number generator.
        """
        if self.kind == "choice":
            return format_value(self.values[int(rng.integers(len(self.values)))])
        low, high = (float(str(value)) for value in self.values)
        if self.kind == "log":
            number = math.exp(rng.uniform(math.log(low), math.log(high)))
        else:
            number = rng.uniform(low, high)
        # The rounded value may be outside the range, so it is clipped.
        return repr(min(max(float(f"{number:.4g}"), low), high))


def list_grid_combinations(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the overrides of all combinations of the values of a search grid; the last key varies fastest.

    Args:
        texts: ``section.key=value,value`` for each key; the values are parsed as YAML.

    Raises:
        ConfigError: if a string has a different form, or if a key is repeated or is not allowed in a sweep.
    """
    options = []
    for key, text in _parse_assignments(texts, "--grid", _EXAMPLE_GRID):
        values = _parse_values(text, "--grid", f"{key}={text}")
        options.append([f"{key}={format_value(value)}" for value in values])
    # Repeated values give only one trial.
    return list(dict.fromkeys(itertools.product(*options)))


def parse_ranges(texts: Sequence[str]) -> list[RandomRange]:
    """Return the ranges of a random search.

    Args:
        texts: ``section.key=KIND:VALUE,VALUE`` for each key, with the kinds of `RandomRange`.

    Raises:
        ConfigError: if a string has a different form, a key is repeated or is not allowed in a sweep, or a range is
            empty.
    """
    ranges = []
    for key, text in _parse_assignments(texts, "--range", _EXAMPLE_RANGE):
        origin = f"{key}={text}"
        kind, colon, values_text = text.partition(":")
        if kind not in ("log", "uniform", "choice") or not colon:
            raise ConfigError(
                f"--range {origin}: write log:LOW,HIGH, uniform:LOW,HIGH or choice:VALUE,VALUE after the key, for "
                f"example {_EXAMPLE_RANGE}"
            )
        values = _parse_values(values_text, "--range", origin)
        if kind != "choice":
            _require_interval(kind, values, origin)
        ranges.append(RandomRange(key, kind, tuple(values)))
    return ranges


def sample_trials(ranges: Sequence[RandomRange], number: int, seed: int) -> list[tuple[str, ...]]:
    """Return the overrides of random trials.

    Each value depends only on the seed, the number of the trial and the key. The first trials are therefore the same
    for any number of trials.

    Args:
        ranges: range of each key that varies.
        number: number of trials. If two trials have the same values, only the first of them is returned.
        seed: seed of the search.
    """
    trials = []
    for index in range(number):
        overrides = []
        for random_range in ranges:
            rng = np.random.default_rng([seed, index, zlib.crc32(random_range.key.encode())])
            overrides.append(f"{random_range.key}={random_range.sample(rng)}")
        trials.append(tuple(overrides))
    return list(dict.fromkeys(trials))


def _parse_assignments(texts: Sequence[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each string ``key=value``.

    Args:
        texts: strings that follow the option in the command.
        option: name of the option, for messages.
        example: example of such a string, for messages.

    Raises:
        ConfigError: if a string has a different form, or if a key is repeated or is not allowed in a sweep.
    """
    keys = set()
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"{option} {text}: write a key and its values, for example {example}")
        if key in keys:
            raise ConfigError(f"{option} {text}: {key} is given twice; give the key once, with all its values")
        if key in _REFUSED_KEYS or key.startswith(("pbs.", "slurm.")):
            raise ConfigError(
                f"{option} {text}: {key} must be the same for all trials of a sweep; write it without {option}"
            )
        keys.add(key)
        yield key, value


def _parse_values(text: str, option: str, origin: str) -> list[object]:
    """Return the values of a comma-separated list such as ``1e-4,[32, 64]``, each parsed as YAML.

    Args:
        text: the list.
        option: name of the option, for messages.
        origin: string of the command that contains the list, for messages.

    Raises:
        ConfigError: if the list is not valid YAML or is empty.
    """
    try:
        values = apply_overrides({}, [f"values=[{text}]"])["values"]
    except ConfigError as error:
        raise ConfigError(f"{option} {origin}: the values are not valid YAML, separated by commas") from error
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{option} {origin}: has no values; separate them by commas")
    return values


def _require_interval(kind: str, values: Sequence[object], origin: str) -> None:
    """Raise a ConfigError unless the values are the two ends of an interval; for ``log``, both must be positive."""
    try:
        ends = [float(str(value)) for value in values]
    except ValueError:
        ends = []
    if len(ends) != 2 or not all(map(math.isfinite, ends)) or not ends[0] < ends[1]:
        raise ConfigError(f"--range {origin}: needs two numbers, the lower one first")
    if kind == "log" and ends[0] <= 0:
        raise ConfigError(f"--range {origin}: log needs positive numbers; use uniform")
