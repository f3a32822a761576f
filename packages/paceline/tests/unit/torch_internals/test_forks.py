"""What we rely on of torch in forked processes."""

import os

import torch

from paceline.torch_internals import forks


def test_a_forked_process_computes_with_the_threads_of_its_parent_or_its_own_number() -> None:
    for count, expected in ((None, torch.get_num_threads()), (3, 3)):
        child = os.fork()
        if child == 0:
            forks.renew_threads(count)
            x = torch.ones(100_000, requires_grad=True)
            (x * 2).sum().backward()
            os._exit(0 if torch.get_num_threads() == expected else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
