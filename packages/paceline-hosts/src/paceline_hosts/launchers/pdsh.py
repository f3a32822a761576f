"""For command lines that name pdsh: the hosts are started over ssh, as pdsh itself starts them.

pdsh passes no input on to the hosts. With it the assignment would have to be stored there, over the ssh connections that check
each host, and the hosts reached a second time. The connections that are open already serve the whole run
(docs/adr/0017-one-command-many-hosts.md).
"""

from __future__ import annotations

from paceline_hosts.launchers.ssh import SshLauncher


class PdshLauncher(SshLauncher):
    """Starts a job on other hosts over OpenSSH."""

    name = "pdsh"


LAUNCHER = PdshLauncher()
