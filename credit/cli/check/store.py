"""Checks of the training store by ``credit check``: its chunks, and the source files from which it was written."""

from __future__ import annotations

import time
from pathlib import Path

from credit.cli.check.report import CheckReport
from credit.config.sections.data import DataConfig
from credit.data.climatology.stored import find_damaged_blocks
from credit.data.store.integrity import require_undamaged
from credit.data.store.repair import REDO_CHANGED_ADVICE, find_source_changes
from credit.data.store.store_reader import StoreReader, open_configured_store, read_description
from credit.data.store.store_settings import require_same_identity


def check_store(conf: DataConfig, report: CheckReport, deep: bool) -> StoreReader:
    """Verify the store of a config and return its reader.

    Args:
        conf: the data section; its store must exist.
        report: receives an error if source files have changed since the store was written, and notes on the checks.
        deep: True to read every field and compare checksums.

    Raises:
        DataError: if the store was written from a different config, is incomplete or is damaged.
    """
    # The store must have been written from this config and from the current source files.
    path = Path(conf.store)
    meta = read_description(path)
    require_same_identity(path, meta, conf)
    changes = find_source_changes(conf, meta)
    if changes.changed:
        report.add(f"data.store: {path}: {changes.describe_changed_files()}; {REDO_CHANGED_ADVICE}")
    if changes.new:
        report.add_note(
            f"store: {len(changes.new)} source files were added after the store was written, the first is "
            f"{changes.new[0]}"
        )
    if changes.gone:
        report.add_note(
            f"store: {len(changes.gone)} source files from which it was written do not exist here, such as "
            f"{changes.gone[0]}"
        )
    if not meta["complete"]:
        # Opening an incomplete store raises an error that names the remedy.
        return open_configured_store(conf)
    # Each chunk must exist and have its full size. With --deep, its checksum must also be correct.
    start = time.perf_counter()
    damage = require_undamaged(path, deep)
    reader = open_configured_store(conf)
    seconds = time.perf_counter() - start
    if deep:
        verified = f"the checksums of {damage.num_chunks} chunks agree"
    else:
        verified = f"{damage.num_chunks} chunks have their full size (--deep compares checksums)"
    report.add_note(f"store: {conf.store} is complete, statistics included; {verified}; {seconds:.1f} s")
    # The climatology, if the store has one, may be damaged although the fields are intact.
    blocks = find_damaged_blocks(path, deep)
    if blocks:
        # Only --deep finds a damaged block that has its full size.
        command = "credit preprocess CONFIG --deep" if deep else "credit preprocess CONFIG"
        report.add(
            f"data.store: {path}: {len(blocks)} blocks of its climatology are lost or damaged; run {command} "
            "preprocess.climatology=true, which fits these blocks again"
        )
    for text in damage.unchecked:
        report.add_note(f"store: not checked: {text}")
    return reader
