#!/usr/bin/env bash
# Python interpreter of job scripts: starts Python in the Apptainer image (docs/containers.md).
# CREDIT_IMAGE: path of the image. CREDIT_BINDS: folders that the run needs, separated by commas.
# Set slurm.python or pbs.python to this script, so that the jobs of `credit submit` use it.
set -euo pipefail
: "${CREDIT_IMAGE:?set it to the path of image.sif}"
exec apptainer exec --nv --bind "${CREDIT_BINDS:-$PWD}" "$CREDIT_IMAGE" python "$@"
