"""Config sections of training on several ranks: degrees of parallelism and data types."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.sections.base import DomainSection, Duration, StrictModel


class ParallelismConfig(DomainSection):
    """Degrees of parallelism.

    The number of ranks is replicate x shard x domain x tensor; shard follows from the others.
    """

    data: Literal["fsdp2", "ddp", "none"] = Field(
        "fsdp2",
        description="Data parallelism. `fsdp2` shards weights, gradients and optimizer state over the ranks. `ddp` "
        "keeps full copies. `none` uses tensor parallelism only. On one process, this key has no effect.",
    )
    tensor: int = Field(
        1,
        ge=1,
        description="Number of ranks that share the layers of one sample; they should be on one host. tensor x "
        "replicate must divide the number of ranks. A layer is not split if `tensor` does not divide its "
        "heads or hidden units.",
    )
    sequence_parallel: bool = Field(
        False,
        description="The ranks of `tensor` also divide the fields of a sample among them (sequence parallelism), so "
        "that domain x tensor ranks do. Each layer that is split gathers the tokens of these ranks.",
    )
    replicate: int = Field(
        1,
        ge=1,
        description="Number of groups of ranks that each hold all shards (hybrid sharding). A common choice is one "
        "group per host.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        description="Number of data-parallel ranks that share the members of one sample. It must divide the number of "
        "data-parallel ranks (replicate x shard) and `trainer.members`. Weights are sharded over these ranks like over "
        "all others.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free the gathered weights after the forward pass and gather them again in the backward pass. "
        "This needs less memory and more communication.",
    )
    cpu_offload: bool = Field(False, description="Keep weights, gradients and optimizer state in host memory.")
    timeout: Duration = Field("30min", description="Time after which a collective that waits for another rank fails.")

    @property
    def divides_fields(self) -> bool:
        """True if ranks divide the fields of a sample among them."""
        return self.num_domain_ranks > 1 or self.sequence_parallel

    @model_validator(mode="after")
    def _require_sequence_fits(self) -> ParallelismConfig:
        """Refuse sequence parallelism with keys that it does not work with."""
        if not self.sequence_parallel:
            return self
        if self.tensor == 1 or self.data != "fsdp2":
            raise ValueError(
                "sequence_parallel: needs tensor above 1, whose ranks it lets divide the fields, and data: fsdp2, "
                f"which sums the gradients over them; tensor is {self.tensor}, data is {self.data}"
            )
        if self.domain_parts is not None:
            raise ValueError(
                "domain: {lat: M, lon: N} does not work with sequence_parallel, which divides the fields into domain x "
                "tensor parts; write the number M x N"
            )
        return self


class MixedPrecisionConfig(StrictModel):
    """Data types of the mixed precision of FSDP2, which a sharded model uses with `trainer.amp`."""

    param_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Type of weights and activations.")
    reduce_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type in which gradients are reduced.")
    output_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the model's output.")
    cast_forward_inputs: bool = Field(
        True,
        description="Cast the inputs of the model and its blocks to param_dtype. false: inputs keep their types, for "
        "example a float32 noise level. The model must then cast inputs where a layer uses them.",
    )
