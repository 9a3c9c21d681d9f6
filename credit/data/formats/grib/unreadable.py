"""Detection of GRIB variables that cannot be read, because their messages do not form one variable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from credit.data.formats.grib.messages import SELECTION_KEYS, Message
from credit.data.formats.select import Value, format_values, is_same_value

# Key in the encoding of a variable that cannot be read; the value is an `UnreadableReason`.
UNREADABLE = "unreadable"
_PA_PER_HPA = 100.0
# Type of pressure level -> number of hPa in its unit.
_HPA_PER_UNIT = {"isobaricInhPa": 1.0, "isobaricInPa": 1.0 / _PA_PER_HPA}
# Type of level -> attributes of the coordinate. Only levels of these types become a dimension of a variable.
LEVEL_ATTRIBUTES = {
    "pressure": {"units": "hPa", "standard_name": "air_pressure"},
    "hybrid": {"units": "1", "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"},
}
# Messages that differ in one of these keys are different variables. Messages that differ in a different key of
# SELECTION_KEYS are different variables only if they have the same time and level.
_DISTINGUISHING_KEYS = ("typeOfLevel", "stepType", "number", "grid")
_MAX_LISTED_NAMES = 5


@dataclass(frozen=True)
class UnreadableReason:
    """Reason why a variable of a GRIB file cannot be read.

    Attributes:
        problem: the reason, as text that follows the name of the variable in an error message.
        choices: key of ``data.sources.N.select`` -> values of this key in the messages of the variable. The user must
            choose a value. Empty if no selection helps.
        other_variables: name of each other variable of the file -> set of the combinations of values in its messages.
            A combination is a tuple with one value for each key of `choices`, in the same order; None if the message
            does not have the key. The tuples show which other variables a selection would exclude.
    """

    problem: str
    choices: Mapping[str, Sequence[Value]]
    other_variables: Mapping[str, frozenset[tuple[Value | None, ...]]]

    def describe(self, level_units: str | None) -> str:
        """Return the problem and advice, as text that follows the name of the variable in an error message.

        Args:
            level_units: ``data.level_units`` if the variable is in vars_3D; None if it is in vars_2D.
        """
        if not self.choices:
            return self.problem
        example = {key: self._choose_value(key, values, level_units) for key, values in self.choices.items()}
        # A variable in vars_3D needs levels. A selection cannot add levels to a variable without levels.
        level_type = _merge_pressure_types(example.get("typeOfLevel"))
        if level_units is not None and level_type not in (None, *LEVEL_ATTRIBUTES):
            return f"{self.problem}; none of these are pressure or model levels, as vars_3D needs: list it in vars_2D"
        if level_units is not None and not example.keys() & set(SELECTION_KEYS):
            return f"{self.problem}; vars_3D needs levels: list it in vars_2D for one of these"
        selection = ", ".join(f"{key}: {format_values([value])}" for key, value in example.items())
        advice = f"{self.problem}; choose with data.sources.N.select: {{{selection}}}"
        # The selection applies to all variables of the source, and excludes variables without matching messages.
        left_out = []
        for name, messages in self.other_variables.items():
            if not any(_matches_selection(values, example) for values in messages):
                left_out.append(name)
        if not left_out:
            return advice
        names = ", ".join(left_out[:_MAX_LISTED_NAMES])
        if len(left_out) > _MAX_LISTED_NAMES:
            names += ", ..."
        return (
            f"{advice}, in an entry of data.sources whose `variables` lists this variable only; the choice leaves out "
            f"{names}: list what you need of these in `variables` of another entry with the same path"
        )

    @staticmethod
    def _choose_value(key: str, values: Sequence[Value], level_units: str | None) -> Value:
        """Return the value to suggest for a key of ``data.sources.N.select``.

        The result is the first value, except for the key ``typeOfLevel``. For this key, the result is pressure or model
        levels for a variable on levels, and any other type for a 2-D variable.

        Args:
            key: GRIB key.
            values: values of the key from which to choose.
            level_units: ``data.level_units`` for a variable on levels; None for a 2-D variable.
        """
        if key != "typeOfLevel":
            return values[0]
        if level_units is None:
            preferred_types: tuple[str, ...] = ()
        elif level_units == "model_level":
            preferred_types = ("hybrid", "pressure")
        else:
            preferred_types = ("pressure", "hybrid")
        # On levels, prefer the type of level of the run. For a 2-D variable, avoid pressure and model levels.
        for level_type in preferred_types:
            for value in values:
                if _merge_pressure_types(value) == level_type:
                    return value
        for value in values:
            if _merge_pressure_types(value) not in LEVEL_ATTRIBUTES:
                return value
        return values[0]


def build_unreadable_reason(
    problem: str, keys: Sequence[str], name: str, messages_by_variable: Mapping[str, Sequence[Message]]
) -> UnreadableReason:
    """Build the `UnreadableReason` of a variable.

    Args:
        problem: the reason, as text that follows the name of the variable in an error message.
        keys: GRIB keys by which messages can be selected; empty if no selection helps.
        name: name of the variable.
        messages_by_variable: name of a variable -> its messages, for each variable of the file.
    """
    choices = {key: _list_values(key, messages_by_variable[name]) for key in keys}
    # Describe each other variable by the distinct combinations of values of these keys.
    other_variables = {}
    for other_name, messages in messages_by_variable.items():
        if other_name == name:
            continue
        values = set()
        for message in messages:
            values.add(tuple(message.key_values.get(key) for key in keys))
        other_variables[other_name] = frozenset(values)
    return UnreadableReason(problem, choices, other_variables)


def find_problem(messages: Sequence[Message]) -> tuple[str | None, Sequence[str]]:
    """Check that the messages of a parameter can be read as one variable.

    Returns:
        Two values: the problem, as text that follows the name of the variable in an error message, or None if there is
        no problem; and the GRIB keys by which the user can select messages to solve the problem. There are no keys if
        no selection helps.
    """
    # Messages with different types of level, step types, members or grids are different variables.
    key_values = [message.key_values | {"typeOfLevel": find_level_type(message)} for message in messages]
    differing_keys = []
    for key in _DISTINGUISHING_KEYS:
        if len({values.get(key) for values in key_values}) > 1:
            differing_keys.append(key)
    if not differing_keys:
        differing_keys = _find_differing_keys(messages)
    if differing_keys:
        values = "; ".join(f"{key} {format_values(_list_values(key, messages))}" for key in differing_keys)
        return f"is in the file several times, with {values}", differing_keys
    # Levels of other types, such as heights above the ground, are selected one by one.
    level_type = find_level_type(messages[0])
    levels = sorted({message.level for message in messages})
    if level_type not in LEVEL_ATTRIBUTES and len(levels) > 1:
        problem = (
            f"is on several levels of the type {level_type} ({format_values(levels)}), which are neither pressure nor "
            "model levels"
        )
        return problem, [level_type]
    return messages[0].grid.problem, []


def _find_differing_keys(messages: Sequence[Message]) -> list[str]:
    """Return the `SELECTION_KEYS` whose values differ between messages of the same time and level."""
    messages_by_time_and_level: dict[tuple[int, float], list[Message]] = defaultdict(list)
    for message in messages:
        messages_by_time_and_level[message.minutes, find_level_value(message)].append(message)
    differing_keys = []
    for key in SELECTION_KEYS:
        for messages_at_level in messages_by_time_and_level.values():
            if len({message.key_values.get(key) for message in messages_at_level}) > 1:
                differing_keys.append(key)
                break
    return differing_keys


def _list_values(key: str, messages: Sequence[Message]) -> list[Value]:
    """Return the sorted distinct values of a GRIB key in some messages."""
    return sorted({message.key_values[key] for message in messages if key in message.key_values})


def _matches_selection(values: Sequence[Value | None], selection: Mapping[str, Value]) -> bool:
    """Return True if a message matches a selection.

    Args:
        values: values of the message for the keys of `selection`, in the same order; None for a key that the message
            does not have. A missing key does not exclude the message.
        selection: GRIB key -> selected value.
    """
    for value, (key, selected) in zip(values, selection.items(), strict=True):
        if value is not None and not is_selected(key, value, selected):
            return False
    return True


def is_selected(key: str, value: Value, selected: Value) -> bool:
    """Return True if a value equals the selected value; levels in hPa and in Pa are treated as the same type of level.

    Args:
        key: GRIB key.
        value: value of the key in a message.
        selected: value of the key in ``data.sources.N.select``.
    """
    if key == "typeOfLevel" and value in _HPA_PER_UNIT and selected in _HPA_PER_UNIT:
        return True
    return is_same_value(value, selected)


def find_level_type(message: Message) -> str:
    """Return the type of level of a message: ``pressure`` for pressure levels, else the GRIB key ``typeOfLevel``."""
    return str(_merge_pressure_types(message.key_values["typeOfLevel"]))


def _merge_pressure_types(type_of_level: Value | None) -> Value | None:
    """Return ``pressure`` for the types of pressure levels in hPa and in Pa, and any other type unchanged."""
    return "pressure" if type_of_level in _HPA_PER_UNIT else type_of_level


def find_level_value(message: Message) -> float:
    """Return the level of a message, in hPa for pressure levels, or else in the units of its type of level."""
    return message.level * _HPA_PER_UNIT.get(str(message.key_values["typeOfLevel"]), 1.0)
