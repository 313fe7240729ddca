"""How a capture reaches the nodes of a job: through Slurm, Kubernetes or ssh, or on this machine."""
