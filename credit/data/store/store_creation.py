"""Creation of a training store without fields, and the check of the disk space for the store."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from credit.calendar import TIME_UNITS
from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.data.sources.source_reader import SourceReader
from credit.data.splits import Split
from credit.data.store import store_reader, store_writer
from credit.data.store.store_settings import config_identity, describe_transforms
from credit.errors import DataError
from credit.utils.atomic import atomic_folder

# Space in bytes for coordinates and descriptions, in addition to the fields.
_SPARE_BYTES = 16 * 2**20
# Mapping from a value of `preprocess.compression` to zarr codecs. Reading from a disk is equally fast with both values.
_COMPRESSORS = {"lz4": [BloscCodec(cname="lz4", clevel=1, shuffle="shuffle")], "none": []}


def create_store(
    path: Path, conf: DataConfig, sources: SourceReader, splits: Mapping[str, Split], settings: PreprocessConfig
) -> zarr.Group:
    """Create a store with its description but without fields, and return the store open for writing.

    Args:
        path: folder of the store, which must not exist.
        conf: the ``data`` section of the config.
        sources: the sources, which determine channels, grid, times and static fields.
        splits: the splits, which determine the period.
        settings: the ``preprocess`` section: compression, blocks, and memory for a chunk of the sources.

    Raises:
        DataError: if no time of the sources is in the splits, or the disk has too little free space.
    """
    times = select_times_in_splits(sources, splits)
    if len(times) == 0:
        raise DataError(f"data.splits: the sources have no time in them; {format_time_span(sources, sources.times)}")
    _, stored_shape = settings.blocks.find_block_and_padded_shape(sources.grid.shape)
    require_disk_space(path, estimate_store_bytes(sources, len(times), stored_shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    # The folder is renamed after it is complete, so other processes never find a store without all its arrays.
    with atomic_folder(path) as folder:
        group = zarr.open_group(folder, mode="w", zarr_format=3)
        _add_small_arrays(group, sources, times)
        _create_arrays_along_time(group, sources, len(times), conf.step_minutes, settings)
        group.attrs["credit"] = {
            "format": store_reader.FORMAT,
            "complete": False,
            "channels": sources.channels.to_dict(),
            "grid": sources.grid.to_dict(),
            "calendar": sources.calendar.name,
            "attributes": sources.attributes,
            "masked_variables": sorted(sources.masks),
            "packing_steps": sources.packing_steps,
            "identity": config_identity(conf),
            "sources": sources.fingerprint_files(),
            "period": list(store_reader.find_span_of_splits(splits)),
            # Statistics are computed when all fields are written.
            "statistics": None,
            "statistics_period": None,
            "moments_transforms": describe_transforms(conf),
        }
    # `group` refers to the temporary folder, which has been renamed.
    return zarr.open_group(path, mode="r+")


def select_times_in_splits(sources: SourceReader, splits: Mapping[str, Split]) -> np.ndarray:
    """Return the times of the sources from the first to the last split, (N,) int64 minutes since 1900.

    Times in the gaps between splits are included.
    """
    first, last = store_reader.find_span_of_splits(splits)
    return sources.times[(sources.times >= first) & (sources.times <= last)]


def estimate_store_bytes(sources: SourceReader, num_times: int, stored_shape: tuple[int, int]) -> int:
    """Return an upper bound of the size in bytes of the fields and moments of `num_times` times in a store.

    The bound is the size of uncompressed float32 fields and float64 moments.

    Args:
        sources: the sources, which determine the channels.
        num_times: number of times.
        stored_shape: number of rows and columns that are stored; blocks may extend beyond the grid.
    """
    height, width = stored_shape
    bytes_per_field = 4 * height * width + 8 * store_writer.NUM_MOMENTS
    return num_times * len(sources.channels.time_varying_stored) * bytes_per_field + _SPARE_BYTES


def require_disk_space(path: Path, needed_bytes: int) -> None:
    """Raise DataError if the disk of a store does not have enough free space.

    Args:
        path: folder of the store, which need not exist.
        needed_bytes: upper bound of the bytes that will be added to the store.

    Raises:
        DataError: if there is too little space; the message states the needed and the free space.
    """
    # The free space is queried for the nearest parent folder that exists.
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise DataError(
            f"data.store: {path} needs up to {_format_size(needed_bytes)} more, but only {_format_size(free_bytes)} "
            f"are free in {folder}; free some space, or name another data.store"
        )


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Return a context that replaces any `OSError`, for example of a full disk, with a `DataError` with advice.

    Args:
        path: folder of the store that is written inside the context.

    Raises:
        DataError: instead of an `OSError` that is raised inside the context.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"data.store: {path} cannot be written ({error}); name another data.store") from error
        # The disk is full, or the quota of the user is used up.
        folder = path.parent
        if not folder.exists():
            folder = Path.cwd()
        free_bytes = shutil.disk_usage(folder).free
        raise DataError(
            f"data.store: {path}: the disk is full ({_format_size(free_bytes)} free); free some space and run the same "
            "command again (it continues where it stopped), or name another data.store"
        ) from error


def _add_small_arrays(group: zarr.Group, sources: SourceReader, times: np.ndarray) -> None:
    """Create and fill the coordinates, masks and static fields of a store.

    Args:
        group: the store, open for writing.
        sources: the sources, which provide the values.
        times: (N,) times of the store in minutes since 1900.
    """
    grid = sources.grid
    channels = sources.channels
    cell_dims = ("latitude", "longitude")
    time_attributes = {"units": TIME_UNITS, "calendar": sources.calendar.name, "standard_name": "time", "axis": "T"}
    _add_array(group, "time", times, ("time",), time_attributes)
    _add_array(group, "latitude", grid.lat, ("latitude",), {"units": "degrees_north", "standard_name": "latitude"})
    _add_array(group, "longitude", grid.lon, ("longitude",), {"units": "degrees_east", "standard_name": "longitude"})
    masks = [sources.masks[name] for name in sorted(sources.masks)]
    # If there are no masked variables, the shape is (0, H, W).
    masks_VHW = np.array(masks, dtype=np.uint8).reshape(-1, *grid.shape)
    _add_array(group, "masks", masks_VHW, ("masked_variable", *cell_dims))
    _add_array(group, "static_fields", sources.static(), ("static_channel", *cell_dims))
    # Names of channels are stored as coordinates, so that xarray and other tools can select by name.
    channels_by_dim = {"channel": channels.time_varying_stored, "static_channel": channels.static_stored}
    for dim, dim_channels in channels_by_dim.items():
        names = np.array([channel.name for channel in dim_channels], dtype=np.dtypes.StringDType())
        _add_array(group, dim, names, (dim,))


def _create_arrays_along_time(
    group: zarr.Group, sources: SourceReader, num_times: int, step_minutes: int, settings: PreprocessConfig
) -> None:
    """Create the empty arrays that `credit.data.store.store_writer` fills part by part.

    Args:
        group: the store, open for writing.
        sources: the sources, which determine grid, channels and the length of a part.
        num_times: number of times in the store.
        step_minutes: time step in minutes.
        settings: the ``preprocess`` section: compression, blocks, and memory for a chunk of the sources.
    """
    grid_shape = sources.grid.shape
    channels = sources.channels.time_varying_stored
    num_channels = len(channels)
    bytes_per_time = 4 * num_channels * grid_shape[0] * grid_shape[1]
    times_per_chunk = sources.count_chunk_times_in_memory(settings.memory_limit_bytes)
    part_length = store_writer.choose_part_length(bytes_per_time, times_per_chunk)
    moments_shape = (store_writer.NUM_MOMENTS, num_channels)
    # Name, shape of one time, type, dimensions after the time, and attributes.
    small_arrays = (
        ("done", (), np.uint8, (), {}),
        ("digest", (), np.uint64, (), {"algorithm": "crc32c"}),
        ("moments", moments_shape, np.float64, ("moment", "channel"), {"step_minutes": step_minutes}),
    )
    for name, shape_per_time, dtype, dims, attributes in small_arrays:
        # A chunk is one part, so no two processes write the same chunk. By default, zarr does not write chunks that
        # contain only fill values. Here all chunks are written, so a missing file of a written part is a lost chunk.
        group.create_array(
            name,
            shape=(num_times, *shape_per_time),
            chunks=(part_length, *shape_per_time),
            dtype=dtype,
            fill_value=0,
            dimension_names=("time", *dims),
            config={"write_empty_chunks": True},
            attributes=attributes,
        )
    block_shape, padded_shape = settings.blocks.find_block_and_padded_shape(grid_shape)
    shards = None
    if block_shape != grid_shape:
        # One file for each time, as without blocks. The index is at the start of the file, so that it can be read
        # without knowing the size of the file.
        shards = {"shape": (1, num_channels, *padded_shape), "index_location": "start"}
    group.create_array(
        "fields",
        shape=(num_times, num_channels, *grid_shape),
        chunks=(1, num_channels, *block_shape),
        shards=shards,
        dtype=np.float32,
        # A chunk that is not yet written is read as missing values.
        fill_value=np.nan,
        # zarr and `ChunkReader` verify the checksum at every read.
        compressors=[*_COMPRESSORS[settings.compression], Crc32cCodec()],
        dimension_names=("time", "channel", "latitude", "longitude"),
        config={"write_empty_chunks": True},
        attributes={"channel": [channel.name for channel in channels]},
    )


def _add_array(
    group: zarr.Group, name: str, values: np.ndarray, dims: tuple[str, ...], attributes: Mapping[str, Any] | None = None
) -> None:
    """Add a small array to a store as one chunk, with the names of its dimensions (`dims`) and its attributes."""
    # zarr does not allow chunks of length 0.
    chunks = tuple(max(1, length) for length in values.shape)
    array = group.create_array(
        name, shape=values.shape, chunks=chunks, dtype=values.dtype, dimension_names=dims, attributes=attributes
    )
    if values.size:
        array[...] = values


def format_time_span(sources: SourceReader, times: np.ndarray) -> str:
    """Return the first time, the last time and the number of times as a phrase.

    Args:
        sources: reader, whose calendar formats the times.
        times: (N,) minutes since 1900.
    """
    if len(times) == 0:
        return "no time"
    return f"{sources.calendar.format(times[0])}..{sources.calendar.format(times[-1])} ({len(times)} times)"


def _format_size(num_bytes: int) -> str:
    """Return a number of bytes as a string in GiB, or in MiB below one GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
