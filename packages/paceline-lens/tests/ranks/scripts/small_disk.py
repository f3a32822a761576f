"""`small_disk.py BYTES WORDS...`: runs `paceline WORDS` where the folder `disk` is a disk of that size.

The disk goes when the last process of the command does.
"""

import ctypes
import os
import subprocess
import sys

from paceline.cli.main import main

_NEW_MOUNTS = 0x00020000


def mount(num_bytes: str) -> None:
    """Mounts the disk for this process and those that it starts."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    os.makedirs("disk", exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", "disk"], check=True)


if __name__ == "__main__":
    mount(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
