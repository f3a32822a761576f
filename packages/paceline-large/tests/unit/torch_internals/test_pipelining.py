"""What a stage of torch's pipelines does around its micro-batches."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

from paceline_large.torch_internals.pipelining import stage_class


def test_a_stage_tells_what_it_computes_and_keeps_gradients_of_an_open_window() -> None:
    phases = []

    @contextmanager
    def computing(phase):
        phases.append(phase)
        yield

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer, x = nn.Linear(2, 2), torch.ones(4, 2)
        layer(x).sum().backward()
        want = 2 * layer.weight.grad
        stage = stage_class()(computing, layer, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum(), scale_grads=False)
        schedule.step(x, target=x)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(layer.weight.grad, want)
    assert phases == ["forward", "forward", "backward", "backward"]
