"""Offloaded weights on an accelerator: copied on a stream of their own while it computes, with the values of the CPU."""

import pytest
import torch
from inference_models import IDS, made

from paceline.checkpoint import save_model
from paceline_large import inference


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("tied", [False, True])
def test_offloaded_weights_give_the_same_results(device, home, tied, tmp_path):
    # Large enough for a copy to be under way while the block before it computes.
    options = {"width": 1024, "num_blocks": 8, "tied": tied}
    plain = made(**options)
    save_model(plain, tmp_path)
    places = {"": f"{device.type}:0", "blocks": home, "head": home, "embedding": home}
    model = inference.load(lambda: type(plain)(**options), tmp_path, placement=places)
    on_device = plain.to(device)
    with torch.inference_mode():
        for order in (None, None, [7, 1, 1, 0], [3], None):
            want = on_device(IDS.to(device), order=order)
            torch.testing.assert_close(model(IDS.to(device), order=order), want)
            torch.testing.assert_close(model(IDS, order=order), want.cpu())
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name
    model.placed.remove()


def test_memory_stays_within_the_forecast(device, tmp_path):
    options = {"width": 2048, "num_blocks": 8}
    save_model(made(**options), tmp_path)
    build = lambda: type(made())(**options)  # noqa: E731
    before = torch.accelerator.memory_allocated()
    work = inference.Workload(batch=1, tokens=3)
    memory = {0: "160MB", "cpu": "1GB"}
    placement = inference.plan(build, tmp_path, memory=memory, workload=work)
    model = inference.load(build, tmp_path, placement=placement)
    torch.accelerator.reset_peak_memory_stats()
    with torch.inference_mode():
        model(IDS.to(device))
    assert torch.accelerator.max_memory_allocated() - before <= 160e6
    model.placed.remove()
