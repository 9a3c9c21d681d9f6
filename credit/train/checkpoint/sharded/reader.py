"""Reader of sharded tensors, which another mesh may have saved."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, Metadata

from credit.train.checkpoint.sharded.index import INDEX, StemIndex


@dataclass(frozen=True)
class ScannedIndex:
    """Index of a folder without the file `INDEX`, from the headers of its files.

    Version 0.20 and older, and other programs, write such folders. The size of this index is proportional to the number
    of ranks that saved.
    """

    metadata: Metadata

    def shapes(self) -> dict[str, torch.Size]:
        """Return name -> shape of the whole tensor."""
        return {name: entry.size for name, entry in self.metadata.state_dict_metadata.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return name -> dtype."""
        return {name: entry.properties.dtype for name, entry in self.metadata.state_dict_metadata.items()}

    def restricted_metadata(self, folder: Path, state: Mapping[str, Tensor]) -> Metadata:
        """Return the metadata of all tensors."""
        return self.metadata


def read_index(folder: Path) -> StemIndex | ScannedIndex:
    """Return the index of the folder of a stem, or of any folder of safetensors files that DCP can read."""
    file = folder / INDEX
    if file.is_file():
        return StemIndex.from_text(file.read_text())
    return ScannedIndex(HuggingFaceStorageReader(str(folder)).read_metadata())


def read_into(folder: Path, index: StemIndex | ScannedIndex, state: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a folder; each rank reads its own parts, without communication.

    Args:
        folder: the folder of the index.
        index: the output of `read_index`.
        state: name -> tensor to fill, for some or all tensors of the folder; plain tensors, or DTensors on any mesh.
    """
    assert not any(tensor.is_meta for tensor in state.values()), "a tensor without memory cannot be filled"
    # The steps of `torch.distributed.checkpoint.load` for one rank alone, without its collectives.
    metadata = index.restricted_metadata(folder, state)
    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def read_whole(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return name -> whole tensor of a folder, on the CPU; only of the tensors in `names`, if it is not None."""
    index = read_index(folder)
    dtypes = index.dtypes()
    state = {}
    for name, shape in index.shapes().items():
        if names is None or name in names:
            state[name] = torch.empty(shape, dtype=dtypes[name])
    read_into(folder, index, state)
    return state
