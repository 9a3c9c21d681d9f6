"""Jobs for PBS and Slurm, and the plan of a run's memory and time before it is queued."""
