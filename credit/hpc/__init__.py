"""Jobs for PBS and Slurm, and what a run needs before it is queued."""
