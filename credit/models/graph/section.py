"""Config section of the graph network."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from credit.config.sections.model import ModelSection


class GraphSection(ModelSection):
    """Config of the graph network: encoder from the grid to an icosahedral mesh, processor on the mesh, and decoder."""

    grid_keys: ClassVar[tuple[str, ...]] = ("refinements",)

    type: Literal["graph"] = Field(description="Registered name of the model.")
    dim: int = Field(
        128, ge=4, description="Number of channels of nodes and edges, and of the hidden layers of the MLPs."
    )
    depth: int = Field(6, ge=1, description="Number of layers of the processor.")
    refinements: Annotated[int, Field(ge=0, le=8)] | Literal["auto"] = Field(
        "auto",
        description="Number of times that the icosahedron is refined; the mesh has 10 * 4^refinements + 2 nodes. "
        "`auto`: the smallest number for which a mesh edge is at most three times as long as the grid spacing.",
    )
    processor: Literal["message_passing", "transformer"] = Field(
        "message_passing",
        description="`message_passing`: messages pass along the edges of all levels of refinement. `transformer`: each "
        "mesh node attends to the nodes that are at most `hops` edges away.",
    )
    dim_head: int = Field(32, ge=1, description="Number of channels of an attention head, for `transformer`.")
    hops: int = Field(
        4, ge=1, description="Radius of attention in edges of the finest level of the mesh, for `transformer`."
    )

    @model_validator(mode="after")
    def _require_effective_keys(self) -> GraphSection:
        """Raise ValueError if keys of the transformer are set and the processor is message passing."""
        for name in ("dim_head", "hops"):
            value = getattr(self, name)
            # The config in a run folder contains every key, so the default value is allowed.
            if self.processor == "message_passing" and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}: {value}: only processor: transformer reads this key; remove it")
        return self
