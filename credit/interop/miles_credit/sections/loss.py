"""Conversion of the ``loss`` section, and of the ensemble settings for a CRPS."""

from __future__ import annotations

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number

_POINTWISE_KINDS = ("mse", "mae", "huber")
_ENSEMBLE_KINDS = ("KCRPS", "almost-fair-crps")


def convert_loss(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the ``loss`` section, `trainer.members` and `model.noise`."""
    is_nested = config.generation == 2 and (config.has("loss.args") or config.has("loss.type"))
    prefix = "loss.args." if is_nested else "loss."
    if is_nested and config.get("loss.type") != "base":
        config.report.record_refused(
            "loss.type", f"`{config.get('loss.type')}` has no counterpart; only `base` is supported"
        )
    key = f"{prefix}training_loss"
    kind = config.get(key, "mse")
    members = config.get_integer("trainer.ensemble_size", 1)
    if kind in _POINTWISE_KINDS:
        draft.set("loss.kind", kind)
    elif kind in _ENSEMBLE_KINDS and members > 1:
        draft.set("loss.kind", "crps")
    elif kind in _ENSEMBLE_KINDS:
        draft.set("loss.kind", "mae", "the CRPS of a single member")
        config.report.record_derived(key, f"`{kind}` of a single member is its absolute error: `loss.kind: mae`")
    else:
        config.report.record_refused(
            key, f"`{kind}` has no counterpart; the losses here are {', '.join(_POINTWISE_KINDS)} and crps"
        )
    draft.set("loss.scaling", "state", "errors in units of the standard deviation, as in miles-credit")
    draft.set("loss.latitude_weights", config.get_flag(f"{prefix}use_latitude_weights", False))
    if is_nested:
        _convert_weighting(config)
    _convert_parameters(config, draft, str(kind))
    _convert_variable_weights(config, draft)
    if members > 1:
        _convert_ensemble(config, draft, members, str(kind))


def _convert_weighting(config: MilesConfig) -> None:
    """Record a weighting of the variables as refused, unless it is ``inverse_variance`` (normalised errors)."""
    key = "loss.args.var_weighting"
    weighting = config.get(key, "none")
    if weighting != "inverse_variance":
        config.report.record_refused(
            key, f"`{weighting}` has no counterpart; the errors of this package are normalised (`inverse_variance`)"
        )


def _convert_parameters(config: MilesConfig, draft: ConfigDraft, kind: str) -> None:
    """Write `loss.huber_delta` or `loss.alpha`, if the loss has this parameter.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        kind: name of the loss in the original config.
    """
    parameters = config.get_section("loss.training_loss_parameters")
    # Nested and flat losses have their parameters in different places.
    delta = config.get("loss.args.base_loss_parameters.delta", parameters.get("delta"))
    if kind == "huber" and delta is not None:
        draft.set("loss.huber_delta", to_number(delta))
    if draft.values["loss"].get("kind") == "mae":
        parameters = {}
    elif kind == "almost-fair-crps":
        draft.set("loss.alpha", to_number(parameters.get("alpha", 1.0)))
    elif kind == "KCRPS":
        # The KCRPS of miles-credit is unbiased, unless `biased` is set.
        draft.set("loss.alpha", 0.0 if parameters.get("biased") else 1.0)


def _convert_variable_weights(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `loss.weights`: one weight for each variable, or one weight for each level of a variable."""
    if not config.get_flag("loss.use_variable_weights", False):
        return
    levels = draft.values["data"].get("levels", [])
    names_2d = set()
    for group in draft.values["data"]["variables"].values():
        names_2d.update(group.get("vars_2D", []))
    weights = {}
    for name in config.peek_section("loss.variable_weights"):
        key = f"loss.variable_weights.{name}"
        value = config.get(key)
        values = value if isinstance(value, list) else [value]
        numbers = [to_number(item) for item in values]
        if None in numbers or len(numbers) not in (1, len(levels)):
            config.report.record_refused(
                key, f"`{value}`: write one number, or one number for each of the {len(levels)} levels"
            )
        # A single weight of a 3-D variable applies to all its levels.
        elif name in names_2d or len(numbers) == 1:
            weights[name] = numbers[0]
        else:
            for level, number in zip(levels, numbers, strict=True):
                weights[_channel_name(name, level, names_2d, draft)] = number
    draft.set("loss.weights", weights)


def _channel_name(variable: str, level: float, names_2d: set[str], draft: ConfigDraft) -> str:
    """Return the name of a channel; the unit of the level is appended if a 2-D variable has the same name."""
    name = f"{variable}{level:g}"
    if name in names_2d:
        name += draft.values["data"]["level_units"]
    return name


def _convert_ensemble(config: MilesConfig, draft: ConfigDraft, members: int, kind: str) -> None:
    """Write the keys of an ensemble with `members` members that differ by dropout, as in miles-credit.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        members: number of members.
        kind: name of the loss in the original config.
    """
    key = "trainer.ensemble_size"
    if kind not in _ENSEMBLE_KINDS:
        config.report.record_refused(key, f"`{members}` members need the loss KCRPS or almost-fair-crps")
        return
    model = draft.values.get("model", {})
    rate = max(model.get("attn_dropout", 0.0), model.get("ff_dropout", 0.0))
    if rate <= 0:
        config.report.record_refused(
            key, f"`{members}` members of a network without noise or dropout are equal; set `model.noise` yourself"
        )
        return
    draft.set("trainer.members", members)
    draft.set("model.noise", [{"kind": "dropout", "rate": rate}], "members differ by dropout")
    config.report.record_derived(key, "approximate: members differ by dropout, here also in the feed-forward layers")
