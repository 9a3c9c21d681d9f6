"""The part of ``credit_check`` that verifies the training store: its chunks, and the files that it was made from."""

from __future__ import annotations

import time
from pathlib import Path

from credit.cli.check.report import CheckReport
from credit.config.schema_data import DataConfig
from credit.data.climatology.stored import find_damaged_blocks
from credit.data.store.integrity import require_whole
from credit.data.store.repair import REDO_CHANGED, find_source_changes
from credit.data.store.store_reader import StoreReader, open_configured_store, read_description, require_same_identity


def check_store(conf: DataConfig, findings: CheckReport, deep: bool) -> StoreReader:
    """Verify the store of a config and open it.

    Args:
        conf: the data section; the store is there.
        findings: receives source files that changed, and what was looked at.
        deep: read every field and compare checksums.

    Raises:
        DataError: for a store of another config, one that is not complete, or one that is damaged.
    """
    path = Path(conf.store)
    meta = read_description(path)
    require_same_identity(path, meta, conf)
    changes = find_source_changes(conf, meta)
    if changes.changed:
        findings.add(f"data.store: {path}: {changes.describe_changed()}; {REDO_CHANGED}")
    if changes.new:
        findings.say(
            f"store: {len(changes.new)} source files are new since it was written, the first is {changes.new[0]}"
        )
    if changes.gone:
        findings.say(
            f"store: {len(changes.gone)} source files that it was made from are not here, such as {changes.gone[0]}"
        )
    if not meta["complete"]:
        return open_configured_store(conf)
    began = time.perf_counter()
    damage = require_whole(path, deep)
    reader = open_configured_store(conf)
    seconds = time.perf_counter() - began
    if deep:
        verified = f"the checksums of {damage.num_chunks} chunks agree"
    else:
        verified = f"{damage.num_chunks} chunks are there in full size (--deep compares checksums)"
    findings.say(f"store: {conf.store} is complete, statistics included; {verified}; {seconds:.1f} s")
    blocks = find_damaged_blocks(path, deep)
    if blocks:
        findings.add(
            f"data.store: {path}: {len(blocks)} blocks of its climatology are lost or damaged; run credit_preprocess "
            f"CONFIG{' --deep' if deep else ''} preprocess.climatology=true, which fits these again"
        )
    for text in damage.unchecked:
        findings.say(f"store: not checked: {text}")
    return reader
