"""sbatch, srun, squeue, scancel, sacct and scontrol over Shoal, for scripts written for Slurm."""
