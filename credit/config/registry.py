"""Registries of components. A registry maps a kind to the class and the config section of the component.

A kind is the name with which a config selects a component, such as ``wxformer`` in ``model.type: wxformer``. The same
decorator registers models, losses, objectives, post-processes and perturbations of the package and of plugins. This
module also lists the modules of the built-in kinds, because loading a config must not import torch: the config imports
only the module of the section, and `Registry.find_class` imports the module of the class.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from credit.config.sections.base import StrictModel
from credit.errors import ConfigError, did_you_mean

Registered = TypeVar("Registered", bound=type)
# Type of the pydantic error for a missing or unknown kind; `validation_messages` handles this type.
WRONG_KIND = "wrong_kind"


@dataclass(frozen=True)
class BuiltInLocation:
    """Module paths of a built-in kind.

    Attributes:
        section: ``module:Class`` of the config section; this module must not import torch or `module`.
        module: module that registers the class of the kind when it is imported.
    """

    section: str
    module: str


class Registry:
    """Registry of one type of component, such as models: it maps each kind to a class and a config section.

    Args:
        key: config key that names a kind, for messages, such as ``model.type``.
        noun: noun for a kind, for messages, such as "model".
        built_in: kind -> modules, for each kind that is part of the package.
    """

    def __init__(self, key: str, noun: str, built_in: Mapping[str, BuiltInLocation]) -> None:
        self.key = key
        self.noun = noun
        self._built_in = dict(built_in)
        self._classes: dict[str, type] = {}
        self._sections: dict[str, type[StrictModel]] = {}

    def register(
        self,
        name: str,
        section: type[StrictModel],
        base: type | None = None,
        section_base: type[StrictModel] = StrictModel,
    ) -> Callable[[Registered], Registered]:
        """Return a class decorator that registers a class and its config section as `name`.

        Args:
            name: name of the kind.
            section: class of the config section.
            base: required base class of the decorated class; None for any class.
            section_base: required base class of `section`.

        Raises:
            ConfigError: raised by the decorator if the name is used by another class or a class does not derive from
                its base.
        """

        def decorate(cls: Registered) -> Registered:
            if base is not None:
                _require_derived(self.noun, name, cls, base)
            _require_derived(self.noun, name, section, section_base)
            self._require_free(name, cls)
            self._classes[name] = cls
            self._sections[name] = section
            return cls

        return decorate

    def find_class(self, name: str) -> type[Any]:
        """Return the class of a kind; the module of a built-in class is imported at the first call.

        Raises:
            ConfigError: if the name is unknown; the message suggests the nearest name.
        """
        self._require_known(name)
        if name not in self._classes:
            importlib.import_module(self._built_in[name].module)
        return self._classes[name]

    def find_section(self, name: str) -> type[StrictModel]:
        """Return the class of the config section of a kind.

        Raises:
            ConfigError: if the name is unknown; the message suggests the nearest name.
        """
        self._require_known(name)
        if name not in self._sections:
            module, _, attribute = self._built_in[name].section.partition(":")
            self._sections[name] = getattr(importlib.import_module(module), attribute)
        return self._sections[name]

    def names(self) -> list[str]:
        """Return the names of all kinds, sorted."""
        return sorted(self._built_in.keys() | self._classes.keys())

    def _require_known(self, name: str) -> None:
        """Raise a ConfigError if a kind is neither built in nor registered."""
        names = self.names()
        if name not in names:
            raise ConfigError(f'{self.key}: "{name}" is not a {self.noun}{did_you_mean(name, names)}')

    def _require_free(self, name: str, cls: type) -> None:
        """Raise a ConfigError if the name is used by another class; a reloaded module may register its class again."""
        owner = self._classes.get(name)
        if owner is not None:
            owner_module = owner.__module__
            # Reloading a module creates a new class object, so compare the names of the classes.
            is_taken = (owner_module, owner.__qualname__) != (cls.__module__, cls.__qualname__)
        elif name in self._built_in:
            # The built-in class has not been imported yet; only its module may register it.
            owner_module = self._built_in[name].module
            is_taken = cls.__module__ != owner_module
        else:
            return
        if is_taken:
            raise ConfigError(
                f'{self.noun} name "{name}" of {cls.__module__} is taken by {owner_module}; choose another name'
            )


def register_class(classes: dict[str, type[Any]], noun: str, name: str, cls: Registered, base: type) -> Registered:
    """Register a class that has no config section, such as a metric or logger, and return the class.

    Args:
        classes: name -> registered class; changed in place.
        noun: noun for the component in messages.
        name: name of the class in a config.
        cls: the class.
        base: required base class of `cls`.

    Raises:
        ConfigError: if the name is used by another class, or `cls` does not derive from `base`.
    """
    _require_derived(noun, name, cls, base)
    owner = classes.get(name, cls)
    # A module that is imported again may register its class again.
    if (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(
            f'{noun} name "{name}" of {cls.__module__} is taken by {owner.__module__}; choose another name'
        )
    classes[name] = cls
    return cls


def _require_derived(noun: str, name: str, cls: object, base: type) -> None:
    """Raise a ConfigError if `cls`, registered as `name`, is not a class that derives from `base`."""
    if isinstance(cls, type) and issubclass(cls, base):
        return
    # A plugin may register a function or an instance by mistake. An instance has no name.
    if hasattr(cls, "__qualname__"):
        shown_name = f"{cls.__module__}.{cls.__qualname__}"
    else:
        shown_name = repr(cls)
    raise ConfigError(
        f'{noun} "{name}": {shown_name} must derive from {base.__module__}.{base.__qualname__}, whose docstring is the '
        "contract"
    )


# The registries of the package. A plugin adds its kinds when it is imported.
MODELS = Registry(
    "model.type",
    "model",
    {
        "graph": BuiltInLocation("credit.models.graph.section:GraphSection", "credit.models.graph.model"),
        "sfno": BuiltInLocation("credit.models.sfno.section:SFNOSection", "credit.models.sfno.model"),
        "swin": BuiltInLocation("credit.models.swin.section:SwinSection", "credit.models.swin.model"),
        "unet": BuiltInLocation("credit.models.unet.section:UNetSection", "credit.models.unet.model"),
        "wxformer": BuiltInLocation("credit.models.wxformer.section:WXFormerSection", "credit.models.wxformer.model"),
    },
)

LOSSES = Registry(
    "loss.kind",
    "loss",
    {
        "mse": BuiltInLocation("credit.losses.section:PointwiseSection", "credit.losses.pointwise"),
        "mae": BuiltInLocation("credit.losses.section:PointwiseSection", "credit.losses.pointwise"),
        "huber": BuiltInLocation("credit.losses.section:PointwiseSection", "credit.losses.pointwise"),
        "crps": BuiltInLocation("credit.losses.section:CRPSSection", "credit.losses.crps"),
        "spectral_crps": BuiltInLocation("credit.losses.section:SpectralCRPSSection", "credit.losses.spectral"),
        "multiscale_crps": BuiltInLocation("credit.losses.section:MultiscaleCRPSSection", "credit.losses.multiscale"),
        "amse": BuiltInLocation("credit.losses.section:AMSESection", "credit.losses.spectral"),
        "sum": BuiltInLocation("credit.losses.section:SumSection", "credit.losses.weighted_sum"),
    },
)

OBJECTIVES = Registry(
    "trainer.objective.kind",
    "training objective",
    {
        "deterministic": BuiltInLocation(
            "credit.forecast.objectives.section:DeterministicSection", "credit.forecast.objectives.deterministic"
        ),
        "ensemble": BuiltInLocation(
            "credit.forecast.objectives.section:EnsembleObjectiveSection", "credit.forecast.objectives.ensemble"
        ),
    },
)

NOISES = Registry(
    "model.noise.kind",
    "kind of noise",
    {
        "global": BuiltInLocation("credit.models.noise.section:GlobalNoiseSection", "credit.models.noise.global_noise"),
        "cell": BuiltInLocation("credit.models.noise.section:CellNoiseSection", "credit.models.noise.cell_noise"),
        "spherical": BuiltInLocation(
            "credit.models.noise.section:SphericalNoiseSection", "credit.models.noise.spherical_noise"
        ),
        "dropout": BuiltInLocation(
            "credit.models.noise.section:DropoutNoiseSection", "credit.models.noise.dropout_noise"
        ),
    },
)

POSTPROCESSES = Registry(
    "model.postprocess.kind",
    "post-process",
    {
        "hyperdiffusion": BuiltInLocation(
            "credit.forecast.postprocess.section:HyperdiffusionSection", "credit.forecast.postprocess.hyperdiffusion"
        ),
        "clamp": BuiltInLocation(
            "credit.forecast.postprocess.section:ClampSection", "credit.forecast.postprocess.clamp"
        ),
        "dry_mass": BuiltInLocation(
            "credit.forecast.postprocess.section:DryMassSection", "credit.forecast.postprocess.fixers"
        ),
        "water": BuiltInLocation(
            "credit.forecast.postprocess.section:WaterSection", "credit.forecast.postprocess.fixers"
        ),
        "energy": BuiltInLocation(
            "credit.forecast.postprocess.section:EnergySection", "credit.forecast.postprocess.fixers"
        ),
    },
)

# The kinds gaussian, correlated and bred share a section and a module.
_INITIAL_PERTURBATION = BuiltInLocation(
    "credit.forecast.ensemble.section:GaussianOrBredSection", "credit.forecast.ensemble.perturbations"
)
PERTURBATIONS = Registry(
    "inference.ensemble.perturbation.kind",
    "perturbation",
    {
        "gaussian": _INITIAL_PERTURBATION,
        "correlated": _INITIAL_PERTURBATION,
        "bred": _INITIAL_PERTURBATION,
        "sppt": BuiltInLocation("credit.forecast.ensemble.section:SPPTSection", "credit.forecast.ensemble.sppt"),
    },
)

_PRODUCT_SECTIONS = "credit.products.section"
# Location of the kinds that reduce the ensemble members to one field.
_MEMBER_STATISTIC = BuiltInLocation(f"{_PRODUCT_SECTIONS}:MemberStatisticSection", "credit.products.ensemble")
PRODUCTS = Registry(
    "inference.products.kind",
    "product",
    {
        "wind_speed": BuiltInLocation(f"{_PRODUCT_SECTIONS}:WindSpeedSection", "credit.products.derived"),
        "wind_speed_at_height": BuiltInLocation(
            f"{_PRODUCT_SECTIONS}:WindSpeedAtHeightSection", "credit.products.derived"
        ),
        "thickness": BuiltInLocation(f"{_PRODUCT_SECTIONS}:ThicknessSection", "credit.products.derived"),
        "accumulation": BuiltInLocation(f"{_PRODUCT_SECTIONS}:AccumulationSection", "credit.products.derived"),
        "mean": _MEMBER_STATISTIC,
        "spread": _MEMBER_STATISTIC,
        "minimum": _MEMBER_STATISTIC,
        "maximum": _MEMBER_STATISTIC,
        "probability": BuiltInLocation(f"{_PRODUCT_SECTIONS}:ProbabilitySection", "credit.products.ensemble"),
        "quantiles": BuiltInLocation(f"{_PRODUCT_SECTIONS}:QuantilesSection", "credit.products.ensemble"),
        "stations": BuiltInLocation(f"{_PRODUCT_SECTIONS}:StationsSection", "credit.products.points.station_values"),
        "meteogram": BuiltInLocation(f"{_PRODUCT_SECTIONS}:MeteogramSection", "credit.products.points.meteogram"),
        "map": BuiltInLocation(f"{_PRODUCT_SECTIONS}:MapSection", "credit.products.maps"),
        "cyclone_tracks": BuiltInLocation(
            f"{_PRODUCT_SECTIONS}:CycloneTracksSection", "credit.products.cyclones.product"
        ),
    },
)


@dataclass(frozen=True)
class RegisteredSection:
    """Annotation of a config key that contains the section of a registered kind.

    The section names its kind, and pydantic validates it with the section class that is registered for this kind.

    Attributes:
        registry: registry of the kinds.
        tag: key in the section that names the kind.
        default: kind of a section without the key `tag`; None if every section must have this key.
        base: required base class of the section classes of allowed kinds.
        only: kinds that are allowed at this key; empty for all kinds.
        excluded: kinds that are not allowed at this key.
    """

    registry: Registry
    tag: str = "kind"
    default: str | None = None
    base: type[StrictModel] = StrictModel
    only: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def find_section(self, raw: object) -> type[StrictModel] | None:
        """Return the section class of the kind that a value names; None if it names no kind that is allowed at this
        key.

        Args:
            raw: value of the key, not yet validated.
        """
        if not isinstance(raw, Mapping):
            return None
        name = raw.get(self.tag, self.default)
        if name not in self.names():
            return None
        return self.registry.find_section(name)

    def names(self) -> list[str]:
        """Return the kinds that are allowed at this key, sorted."""
        names = self.only or self.registry.names()
        allowed = [name for name in names if name not in self.excluded]
        return [name for name in allowed if issubclass(self.registry.find_section(name), self.base)]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return a pydantic schema that calls `_build_section` before the validation of pydantic."""
        return core_schema.no_info_before_validator_function(self._build_section, handler(source))

    def _build_section(self, raw: object) -> object:
        """Validate a plain mapping and return its section; return a value that is not a mapping unchanged.

        Raises:
            PydanticCustomError: if the mapping names no kind, or a kind that is not allowed at this key.
        """
        if not isinstance(raw, Mapping):
            return raw
        # Every section class has a key for its kind, so add the default kind to the mapping.
        raw_with_kind = dict(raw)
        if self.default is not None:
            raw_with_kind.setdefault(self.tag, self.default)
        if self.tag not in raw_with_kind:
            choices = ", ".join(self.names())
            raise self._build_error(f"this key is missing; it names the {self.registry.noun}: {choices}")
        name = raw_with_kind[self.tag]
        if name not in self.names():
            raise self._build_error(f'"{name}" is not a {self.registry.noun}{did_you_mean(str(name), self.names())}')
        return self.registry.find_section(name).model_validate(raw_with_kind)

    def _build_error(self, text: str) -> PydanticCustomError:
        """Return an error about the kind. Pydantic reports it together with the other problems of the config."""
        return PydanticCustomError(WRONG_KIND, "{text}", {"tag": self.tag, "text": text})


def find_registered_sections(field: FieldInfo) -> list[RegisteredSection]:
    """Return the `RegisteredSection` annotations of a config key, including annotations inside a list or union."""
    direct = [item for item in field.metadata if isinstance(item, RegisteredSection)]
    return direct + list(_iterate_annotations(field.annotation))


def _iterate_annotations(annotation: Any) -> Iterator[RegisteredSection]:
    """Yield the `RegisteredSection` annotations inside a type, for example in the item type of a list."""
    for argument in get_args(annotation):
        if isinstance(argument, RegisteredSection):
            yield argument
        else:
            yield from _iterate_annotations(argument)
