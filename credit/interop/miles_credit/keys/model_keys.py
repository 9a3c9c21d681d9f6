"""Rows of the keys under ``model``."""

from __future__ import annotations

from credit.interop.miles_credit.keys.row import KeyRow, derived_rows, ignored_rows, mapped_rows, refused_rows

_OTHER_NETWORK = "a key of a network without a counterpart; see `model.type`"
_ONLY_FUXI = "a key of FuXi; the conversion of `model.type: fuxi` reads it"
_DIFFERENT_BUDGET = (
    "this package closes the budget differently (whole columns, different variables are scaled), so the model would "
    "change; deactivate the fixer, or set `model.postprocess` yourself, see docs/constraints.md"
)
_FIXERS = ("global_mass_fixer", "global_drymass_fixer", "global_water_fixer", "global_energy_fixer",
           "global_energy_fixer_updown")  # fmt: skip


def _fixer_rows() -> list[KeyRow]:
    """Return the rows of the budget fixers, which are refused if they are active."""
    rows = []
    for name in _FIXERS:
        section = f"model.post_conf.{name}"
        rows += refused_rows("12", f"{section}.activate", _DIFFERENT_BUDGET, harmless_values=(False, None))
        rows += ignored_rows("12", f"{section}.*", f"used only if `{name}` is active")
    return rows


ROWS: tuple[KeyRow, ...] = (
    *mapped_rows("12", "model.type", "`model.type`, and `model.decoder` of a WXFormer"),
    *mapped_rows(
        "12",
        "model.dim model.depth model.dim_head model.global_window_size model.local_window_size "
        "model.cross_embed_kernel_sizes model.cross_embed_strides model.attn_dropout model.ff_dropout "
        "model.use_spectral_norm model.interp",
        "the same key",
    ),
    *derived_rows(
        "12",
        "model.image_height model.image_width",
        "the grid of the data; rows and columns must be latitudes and longitudes",
    ),
    *derived_rows(
        "12",
        "model.channels model.surface_channels model.input_only_channels model.output_only_channels",
        "the number of variables in `data.variables`",
    ),
    *derived_rows("12", "model.levels", "the number of `data.levels`"),
    *derived_rows("12", "model.frames", "`data.history_len`"),
    *refused_rows(
        "12", "model.output_frames", "a step of this package has one output frame", harmless_values=(None, 1)
    ),
    *refused_rows(
        "12",
        "model.patch_height model.patch_width",
        "patches of a WXFormer are single cells; for a FuXi, the key is `model.patch_size`",
        harmless_values=(None, 1),
    ),
    *ignored_rows(
        "12", "model.frame_patch_size model.static_channels", "the class of the network does not read this key"
    ),
    *mapped_rows("12", "model.padding_conf.activate", "`model.padding`; null for none"),
    *mapped_rows("12", "model.padding_conf.mode", "`model.padding.mode`"),
    *mapped_rows(
        "12",
        "model.padding_conf.pad_lat model.padding_conf.pad_lon",
        "`model.padding.lat`, `model.padding.lon`, in cells of the input grid",
    ),
    *mapped_rows(
        "1", "model.pad_lat model.pad_lon", "`model.padding` with `mode: mirror`, unless `padding_conf` is given"
    ),
    *ignored_rows("2", "model.pad_lat model.pad_lon", "generation 2 reads only `model.padding_conf`"),
    *derived_rows("12", "model.upsample_with_ps", "`model.decoder`, which is derived from `model.type`"),
    *derived_rows("12", "model.upsample_v_conv", "`model.decoder`; `crossformer` with true has no counterpart"),
    *ignored_rows(
        "12", "model.decoder_attention_type", "the classes of `wxformer` and `crossformer` do not read this key"
    ),
    *refused_rows("12", "model.attention_type", "attention in the decoder has no counterpart", harmless_values=(None,)),
    *mapped_rows("12", "model.post_conf.activate", "`model.postprocess` and `data.variable_options`"),
    *mapped_rows(
        "12",
        "model.post_conf.tracer_fixer.activate model.post_conf.tracer_fixer.tracer_name "
        "model.post_conf.tracer_fixer.tracer_thres model.post_conf.tracer_fixer.tracer_thres_max",
        "`data.variable_options.NAME.minimum` and `maximum`",
    ),
    *refused_rows(
        "12",
        "model.post_conf.tracer_fixer.denorm",
        "bounds of normalised values; bounds of this package are in units of the variable",
        harmless_values=(None, True),
    ),
    *ignored_rows(
        "12", "model.post_conf.tracer_fixer.activate_outside_model", "bounds apply to the output of every step"
    ),
    *_fixer_rows(),
    *refused_rows("12", "model.post_conf.skebs.activate", "learned backscatter has no counterpart", (False, None)),
    *ignored_rows("12", "model.post_conf.skebs.*", "used only if `skebs` is active"),
    *ignored_rows("12", "model.post_conf.grid", "areas are derived from the coordinates of the data"),
    *ignored_rows(
        "12",
        "model.post_conf.requires_scaling model.post_conf.scaling_coefs.*",
        "used only by the budget fixers",
    ),
    *refused_rows(
        "12",
        "model.num_heads model.num_groups model.window_size model.proj_drop model.attn_drop model.drop_path "
        "model.use_noise",
        _ONLY_FUXI,
        harmless_values=(None, False, 0),
    ),
    *refused_rows(
        "12",
        "model.architecture.* model.diffusion.* model.attn_dim_head model.attn_heads model.checkpoint_stages "
        "model.conditional_dimensions model.depths model.dim_mults model.drop_path_rate model.dropout model.edge_path "
        "model.embed_dim model.flash_attn model.full_attn model.full_pos_embed model.hidden_size model.history_len "
        "model.img_size model.img_window_ratio model.in_chans model.learned_sinusoidal_cond "
        "model.learned_sinusoidal_dim model.learned_variance model.mlp_ratio model.n_blocks model.n_static_variables "
        "model.n_surface_variables model.n_variables model.out_chans "
        "model.patch_size model.random_fourier_features model.rel_pos model.residual model.rk4_integration "
        "model.sinusoidal_pos_emb_theta model.use_edge_attr model.self_condition",
        _OTHER_NETWORK,
    ),
)
