#!/usr/bin/env bash
# Write one of every kind of file that a run of version 0.14 leaves. Run in an empty folder with make_world.py in it
# and a checkout of version 0.14.0 as installed package and on PYTHONPATH.
set -euo pipefail
export OMP_NUM_THREADS=1
python make_world.py
credit preprocess config.yml
credit train config.yml
rm -r run/checkpoints/step_00000020 run/checkpoints/latest run/checkpoints/best
ln -s step_00000010 run/checkpoints/latest
ln -s step_00000010 run/checkpoints/best
credit train config.yml save_loc=tuned trainer.resume=run/checkpoints/latest trainer.max_steps=4 trainer.early_view=null \
    'trainer.lora={rank: 2, alpha: 4, targets: ["*.to_qkv", "*.contract"]}'
torchrun --standalone --nproc-per-node=4 -m credit.cli.main train config.yml save_loc=sharded \
    trainer.parallelism.tensor=2 trainer.max_steps=10
rm -r sharded/checkpoints/step_00000000
credit convert config.yml --export export.safetensors
credit rollout config.yml
credit verify config.yml

# What each of them goes on to, in a copy; the numbers are what later versions are held to.
mkdir continued
cp -r run sharded tuned continued/
credit train config.yml save_loc=continued/run
credit train config.yml save_loc=continued/sharded trainer.max_steps=14
credit train continued/tuned/config.yml save_loc=continued/tuned trainer.max_steps=8
credit train config.yml save_loc=continued/exported trainer.resume=export.safetensors trainer.max_steps=4
python collect.py
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=2026-11-24 -cJf files.tar.xz config.yml data.nc store.zarr \
    export.safetensors run sharded tuned
