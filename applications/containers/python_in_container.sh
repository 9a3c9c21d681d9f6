#!/usr/bin/env bash
# Python interpreter of job scripts: starts Python in the Apptainer image (docs/containers.md).
# CREDIT_IMAGE is the image; CREDIT_BINDS are the folders that the run needs, separated by commas.
# Give it to `credit submit` with slurm.python or pbs.python.
set -euo pipefail
: "${CREDIT_IMAGE:?set it to the path of image.sif}"
exec apptainer exec --nv --bind "${CREDIT_BINDS:-$PWD}" "$CREDIT_IMAGE" python "$@"
