"""Many hosts by one command: launchers for ssh, SLURM, Kubernetes, Ray and MPI, and the examination of hosts."""
