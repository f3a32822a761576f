"""`python -m paceline_hosts.remote`: what ssh, mpirun and srun start on each host."""

from __future__ import annotations

import sys

from paceline_hosts.remote import agent

if __name__ == "__main__":
    sys.exit(agent.main(sys.argv[1:]))
