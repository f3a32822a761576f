"""Importing this module loads the front of torch's compiler, which takes a second.

The first optimizer that a process makes and DistributedDataParallel load it. A process whose forks make one of those imports
it once for all of them.
"""

import torch._dynamo as _front  # noqa: F401  (imported for its effect)
