"""Checks of the checkpoint or the weights from which a run would start."""

from __future__ import annotations

from pathlib import Path

from credit.channels import ChannelMap
from credit.cli.check.data import DataSummary
from credit.cli.check.report import CheckReport
from credit.config import Config
from credit.data.splits import require_no_leakage
from credit.models.lora import base_state_dict, checkpoint_state_dict
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.train.build.assets import ModelAssets
from credit.train.build.dry_run import DryRunResult, build_placeholder_assets
from credit.train.build.fine_tuning import choose_base_checkpoint
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.config_changes import list_extendable_keys, require_same_network_function, require_same_run
from credit.train.checkpoint.external_weights import (
    adapt_assets_to_weights,
    describe_added_tensors,
    initialise_missing_noise,
    read_exported_meta,
    read_state_file,
)
from credit.train.checkpoint.resume import choose_checkpoint, find_weights_file, load_run_state
from credit.train.checkpoint.trained_fields import (
    adapt_weights,
    add_grid_advice,
    describe_adaptation,
    find_tensors_to_adapt,
)


def check_resume(
    config: Config,
    data: DataSummary | None,
    dry_run: DryRunResult | None,
    degrees: ParallelDims,
    report: CheckReport,
) -> tuple[Config, int]:
    """Find the checkpoint or the weights from which the run would start, and check that the run can use them.

    Args:
        config: config of the run.
        data: summary of the data; None if the grid is not known.
        dry_run: result of the dry run; None if the model cannot be built.
        degrees: size of each axis of the run's mesh.
        report: receives errors, warnings and notes.

    Returns:
        The config of the run with the global batch size of the checkpoint, and the first step (0 without a checkpoint).
    """
    folder = Path(config.save_loc)
    first_step = 0
    with report.collect():
        if data is not None:
            config = config.model_copy(update={"model": config.model.resolve(data.grid.shape)})
        # The run would start from a checkpoint, from weights of a different run or program, or from random weights.
        path = choose_checkpoint(config, folder)
        starts_from_step_0 = config.trainer.resume == "never"
        _report_damaged_checkpoints(folder / "checkpoints", path, starts_from_step_0, report)
        base = choose_base_checkpoint(config, path)
        weights = find_weights_file(config, path)
        if weights is not None:
            _check_initial_weights(config, data, dry_run, weights, report)
        if path is None:
            return config, 0

        # Compare the checkpoint with the config and the data. Fine-tuning starts at step 0 with the weights of the base
        # run.
        meta = checkpoint.load_meta(path)
        continues_run = base is None or path.resolve() != base
        first_step = meta["step"] if continues_run else 0
        # If the data cannot be read, only the two configs can be compared.
        if data is None:
            if continues_run:
                require_same_run(config, meta["config"], path)
            else:
                trained_channels = ChannelMap.from_dict(meta["channels"])
                extendable_keys = list_extendable_keys(config, trained_channels)
                require_same_network_function(config, meta["config"], path, extendable_keys=extendable_keys)
            return config, first_step

        def build_dummy_assets() -> ModelAssets:
            return build_placeholder_assets(config, data.grid, data.attributes, data.masks)

        config, assets = load_run_state(config, data, DeviceGrid(degrees), path, continues_run, build_dummy_assets)
        _report_seen_test_period(config, data, assets, path, report)

        if dry_run is not None:
            _check_tensors(config, dry_run, path, continues_run, report)
        report.add_note(f"checkpoint: the run begins with {path}, step {first_step}")
    return config, first_step


def _check_tensors(config: Config, dry_run: DryRunResult, path: Path, continues_run: bool, report: CheckReport) -> None:
    """Compare the names and shapes of a checkpoint's tensors with the tensors of the model.

    Args:
        config: config of the run.
        dry_run: result of the dry run, with the model.
        path: the checkpoint.
        continues_run: False if the run begins at step 0 with the checkpoint's best weights, as fine-tuning does.
        report: receives a note about tensors that are not in the checkpoint and keep their initial values.

    Raises:
        CheckpointError: if the tensors in the checkpoint do not match the model.
    """
    if continues_run:
        state = checkpoint_state_dict(dry_run.model)
        stored_shapes = checkpoint.read_stored_shapes(path, "model")
    else:
        meta = checkpoint.load_meta(path)
        stored_shapes = checkpoint.read_stored_shapes(path, "forecast")
        adapted_names = find_tensors_to_adapt(dry_run.model, meta)
        stored = checkpoint.load_tensors(path, "forecast", adapted_names)
        for name, value in adapt_weights(dry_run.model, stored, meta).items():
            stored_shapes[name] = value.shape
        adaptation = describe_adaptation(dry_run.model, meta)
        if adaptation:
            report.add_note(f"weights: {adaptation}")
        state = base_state_dict(dry_run.model, stored_shapes.keys())
        added_values = initialise_missing_noise(dry_run.model, stored_shapes.keys(), config.seed)
        if added_values:
            report.add_note(f"weights: {describe_added_tensors(stored_shapes.keys(), added_values.keys())}")
        with add_grid_advice(dry_run.model, meta):
            checkpoint.require_same_tensors(state, stored_shapes, path)
        return
    checkpoint.require_same_tensors(state, stored_shapes, path)


def _check_initial_weights(
    config: Config, data: DataSummary | None, dry_run: DryRunResult | None, path: Path, report: CheckReport
) -> None:
    """Check that the weights of a different run or program match the data and the model.

    Args:
        config: config of the run.
        data: summary of the data; None if the grid is not known.
        dry_run: result of the dry run; None if the model cannot be built.
        path: file with the weights.
        report: receives errors and notes.

    Raises:
        CheckpointError: if the tensors in the file do not match the model.
    """
    if data is not None:
        assets = build_placeholder_assets(config, data.grid, data.attributes, data.masks)
        adapted_assets = adapt_assets_to_weights(config, assets, data, path)
        _report_seen_test_period(config, data, adapted_assets, path, report)
    if dry_run is not None:
        # Tensors that are not in the file, such as the tensors of noise layers, keep their initial values.
        state = read_state_file(path)
        meta = read_exported_meta(path)
        if meta is not None:
            state |= adapt_weights(dry_run.model, state, meta)
            adaptation = describe_adaptation(dry_run.model, meta)
            if adaptation:
                report.add_note(f"weights: {adaptation}")
        shapes = {name: value.shape for name, value in state.items()}
        added_values = initialise_missing_noise(dry_run.model, shapes.keys(), config.seed)
        added_shapes = {name: value.shape for name, value in added_values.items()}
        all_shapes = {**shapes, **added_shapes}
        checkpoint.require_same_tensors(dry_run.model.state_dict(), all_shapes, path)
        report.add_note(f"weights: the run begins with the weights in {path}")
        if added_values:
            report.add_note(f"weights: {describe_added_tensors(shapes.keys(), added_values.keys())}")


def _report_seen_test_period(
    config: Config, data: DataSummary, assets: ModelAssets, path: Path, report: CheckReport
) -> None:
    """Report an error if the test period overlaps with the times on which the weights in `path` were trained.

    Args:
        config: config of the run; if ``verification.allow_seen`` is set, nothing is checked.
        data: summary of the data, with the test period.
        assets: description of the weights, with the periods on which they were trained.
        path: file or checkpoint with the weights.
        report: receives the error.
    """
    if "test" in data.splits and not config.verification.allow_seen:
        with report.collect():
            require_no_leakage(data.splits["test"], assets.trained_periods, str(path), data.calendar)


def _report_damaged_checkpoints(
    folder: Path, start_checkpoint: Path | None, starts_from_step_0: bool, report: CheckReport
) -> None:
    """Report damaged checkpoints in the run folder. The run would skip them, or rename them if it starts from step 0.

    Args:
        folder: the folder ``checkpoints`` of this run.
        start_checkpoint: checkpoint of this or a different run from which the run would continue; None if there is no
            such checkpoint.
        starts_from_step_0: True if ``trainer.resume: never`` is set.
        report: receives an error for each damaged checkpoint, or a warning if `starts_from_step_0` is True.
    """
    is_in_folder = start_checkpoint is not None and start_checkpoint.resolve().parent == folder.resolve()
    for path in checkpoint.list_checkpoints(folder):
        # The run uses the newest intact checkpoint, so every newer checkpoint is damaged.
        if is_in_folder and checkpoint.parse_step(path) <= checkpoint.parse_step(start_checkpoint):
            continue
        if starts_from_step_0:
            report.add_warning(
                f"checkpoint: {path} is damaged; with trainer.resume: never it is renamed, "
                "and training starts from step 0"
            )
            continue
        consequence = "start anew" if start_checkpoint is None else f"start from {start_checkpoint}"
        report.add(
            f"{path}: {checkpoint.verify_checkpoint(path)}; training would skip it and {consequence}; remove it, or "
            "copy it again"
        )
