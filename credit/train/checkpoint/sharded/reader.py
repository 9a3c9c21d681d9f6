"""Reader of sharded tensors, which may have been saved on a different mesh."""

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
    """Index of a folder without the file `INDEX`, built from the headers of the safetensors files.

    Version 0.20, older versions and other programs write folders without `INDEX`. The size of this index is
    proportional to the number of ranks that saved the tensors.
    """

    metadata: Metadata

    def shapes(self) -> dict[str, torch.Size]:
        """Return a dict: name -> shape of the complete tensor."""
        return {name: entry.size for name, entry in self.metadata.state_dict_metadata.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return a dict: name -> dtype of the tensor."""
        return {name: entry.properties.dtype for name, entry in self.metadata.state_dict_metadata.items()}

    def metadata_for(self, folder: Path, state: Mapping[str, Tensor]) -> Metadata:
        """Return the metadata of all tensors, from which DCP (torch.distributed.checkpoint) can fill `state`."""
        return self.metadata


def read_index(folder: Path) -> StemIndex | ScannedIndex:
    """Return the index of the folder of a stem, or of any other folder of safetensors files that DCP can read."""
    file = folder / INDEX
    if file.is_file():
        return StemIndex.from_text(file.read_text())
    return ScannedIndex(HuggingFaceStorageReader(str(folder)).read_metadata())


def read_into(folder: Path, index: StemIndex | ScannedIndex, state: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a folder; each rank reads its parts without communication.

    Args:
        folder: the folder that `index` describes.
        index: the output of `read_index`.
        state: name -> tensor to fill, for some or all tensors of the folder; plain tensors, or DTensors on any mesh.
    """
    assert not any(tensor.is_meta for tensor in state.values()), "a tensor without memory cannot be filled"
    # These are the steps of `torch.distributed.checkpoint.load` for a single rank, without the collectives.
    metadata = index.metadata_for(folder, state)
    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def read_complete_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the complete tensors of a folder on the CPU: name -> tensor.

    Args:
        folder: the folder of a stem, or any other folder that `read_index` can read.
        names: names of the tensors that are read; None for all.
    """
    index = read_index(folder)
    dtypes = index.dtypes()
    state = {}
    for name, shape in index.shapes().items():
        if names is None or name in names:
            state[name] = torch.empty(shape, dtype=dtypes[name])
    read_into(folder, index, state)
    return state
