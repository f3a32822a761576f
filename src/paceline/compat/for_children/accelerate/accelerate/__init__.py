"""accelerate in a process that a served one has started (a spawned worker, a command): it is served there as well.

The folder of this package stands first in PYTHONPATH, which children inherit; see `paceline.compat.install`.
"""

import sys

from paceline.compat import install

# `install` refuses where the library is imported already, and until it returns this module stands for it.
del sys.modules["accelerate"]
install(["accelerate"])
sys.modules["accelerate"] = __import__("accelerate")
