"""Calls that go wrong in scripts, and things of odd kinds, in one process."""

import os
import threading

import numpy
import pytest
import torch
from torch import nn

from paceline import Accelerator, CheckpointError, ConfigError, DataError, PlanError, TrainError
from paceline.world.participant import split_part


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model: float(model(torch.ones(1, 2)).sum().detach()), "it is a float"),
        (lambda model: model(torch.ones(1, 2)).detach().sum(), "no parameter that requires a gradient took part"),
        (lambda model: model(torch.ones(4, 2)), "it has the shape (4, 1)"),
    ],
)
def test_a_loss_without_a_way_back(loss, why):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(TrainError) as caught:
        accelerator.backward(loss(model))
    assert caught.value.code == "backward-loss"
    assert why in str(caught.value)
    accelerator.backward(model(torch.ones(4, 2)), gradient=torch.ones(4, 1))


@pytest.mark.parametrize("setting", [{"mixed_precision": "fp16"}, {"gradient_accumulation_steps": 2}])
def test_a_closure_where_it_cannot_work(setting):
    accelerator = Accelerator(cpu=True, **setting)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TrainError) as caught:
        optimizer.step(lambda: pytest.fail("it must not be called"))
    assert caught.value.code == "optimizer-closure"
    assert str(next(iter(setting.values()))) in str(caught.value)


class WithoutLength(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([4, 2, 0])


def test_a_sampler_needs_no_length():
    dataset = torch.utils.data.TensorDataset(torch.arange(5))
    loader = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(dataset, 2, sampler=WithoutLength()))
    assert [batch.tolist() for (batch,) in loader] == [[4, 2], [0]]


def test_a_closure_sees_corrected_gradients():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 1)).sum()
        accelerator.backward(loss, num_items=4)
        return returned(loss)

    # A line search needs the number of which the gradients are the gradients: the mean.
    for kind in (torch.Tensor.detach, torch.Tensor.item):
        returned = kind
        assert float(optimizer.step(closure)) == pytest.approx(before)
        before -= 1
        assert model.weight.item() == pytest.approx(before)
    with pytest.raises(TrainError, match=r"\[optimizer-closure\]"):
        returned = torch.square
        optimizer.step(closure)


def test_a_model_that_nothing_initialises():
    with torch.device("meta"):
        model = nn.PReLU()
        model.extra, model.inside = nn.Parameter(torch.zeros(2)), nn.Linear(2, 2)
    with pytest.raises(PlanError) as caught:
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert caught.value.code == "model-meta"
    assert "initialises extra" in str(caught.value)


def test_compiling_changes_no_names(tmp_path):
    accelerator = Accelerator(cpu=True)
    before = accelerator.prepare(torch.compile(nn.Linear(2, 1), backend="eager"))
    plain = accelerator.prepare(nn.Linear(2, 1))
    after = torch.compile(plain, backend="eager")
    for model in (before, after):
        assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}
        accelerator.save_model(model, tmp_path)
    assert accelerator.unwrap_model(after) is plain
    assert isinstance(accelerator.unwrap_model(before, keep_torch_compile=False), nn.Linear)


def test_strict_is_offered_where_an_error_speaks_of_it(tmp_path):
    first = Accelerator(cpu=True)
    model = first.prepare(nn.Linear(2, 1))
    first.save_state(tmp_path / "saved")
    second = Accelerator(cpu=True)
    more = nn.ModuleDict({"weight": nn.Linear(2, 1)})
    more.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    other = second.prepare(more)
    with pytest.raises(CheckpointError, match="strict=False"):
        second.load_state(tmp_path / "saved")
    second.load_state(tmp_path / "saved", strict=False)
    assert torch.equal(other.bias, model.bias)


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError) as caught:
        Accelerator(cpu=True).load_state(tmp_path / "file")
    assert caught.value.code == "checkpoint-none"
    assert "it is a file" in str(caught.value)


def test_saving_keeps_links_and_never_replaces_a_pipe_or_a_device(tmp_path):
    accelerator = Accelerator(cpu=True)
    (tmp_path / "real.pt").write_text("old")
    (tmp_path / "link.pt").symlink_to("real.pt")
    accelerator.save([1], tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert torch.load(tmp_path / "real.pt", weights_only=True) == [1]
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    accelerator.save([1], tmp_path / "pipe")
    reader.join(5)
    assert received[0] and (tmp_path / "pipe").is_fifo()


def test_parts_of_things_of_any_kind():
    array = numpy.arange(3)
    assert split_part(array, 1, 2, pad=True).tolist() == [2, 2]
    assert split_part(range(5), 1, 2, pad=True) == [3, 4, 4]
    assert split_part(range(5), 0, 2) == range(3)
    assert split_part(torch.arange(3), 3, 4, pad=True).tolist() == [2]
    assert split_part((1, 2, 3), 1, 2, pad=True) == (3, 3)
    assert split_part([], 1, 2, pad=True) == []
    assert split_part({"a": [1, 2, 3], "name": "abc", "n": 4}, 1, 2) == {"a": [3], "name": "abc", "n": 4}
    for size in (1, 2):
        with pytest.raises(DataError) as caught:
            split_part({"a": [1, 2], "b": [1, 2, 3]}, 0, size)
        assert caught.value.code == "split-lengths"


def test_gradients_from_elsewhere_under_fp16():
    accelerator = Accelerator("fp16", cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TrainError) as caught:
        optimizer.step()
    assert caught.value.code == "backward-missing"


def test_clipping_before_there_is_a_gradient():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
    accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_what_cannot_be_kept_is_told_before_training(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        Accelerator(cpu=True, project_dir=tmp_path, total_limit=0)
    assert caught.value.code == "checkpoint-keep"


def test_errors_name_arguments_as_they_are_written():
    with pytest.raises(ConfigError, match=r"Accelerator\(gradient_accumulation_steps=...\)"):
        Accelerator(cpu=True, gradient_accumulation_steps=0)


def test_values_logged_while_no_tracker_runs(tmp_path, caplog):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 1.0})
    assert [record.getMessage().count("init_trackers") for record in caplog.records] == [1]


def test_tied_parameters_stay_tied_where_a_move_makes_new_ones(monkeypatch):
    """As on devices such as XLA's, where `Module.to` puts a new parameter under each name."""
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    assert model[0].weight is not before
    assert model[1].weight is model[0].weight
    assert any(parameter is model[0].weight for parameter in optimizer.param_groups[0]["params"])


def test_a_loop_over_the_loader_of_another_accelerator(caplog):
    first, second = Accelerator(cpu=True), Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = first.prepare(torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2))
    net = nn.Linear(2, 1)
    net, optimizer = second.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def train():
        for batch in loader:
            with second.accumulate(net):
                second.backward(net(batch).sum())
                optimizer.step()

    train()
    train()
    told = [
        record.getMessage() for record in caplog.records if "another Accelerator has prepared" in record.getMessage()
    ]
    assert len(told) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_a_window_clears_the_older_gradient_of_a_parameter_that_has_joined(set_to_none):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    body, head, optimizer = accelerator.prepare(body, head, optimizer)
    before = head.weight.clone()
    accelerator.gradient_accumulation_steps = 1
    accelerator.backward(head(body(torch.ones(1, 1))).sum())
    optimizer.step()
    accelerator.gradient_accumulation_steps = 2
    head.requires_grad_(False)
    for number in range(2):
        with accelerator.accumulate(body, head):
            if number:
                optimizer.add_param_group({"params": head.parameters()})
            optimizer.zero_grad(set_to_none=set_to_none)
            accelerator.backward(body(torch.ones(1, 1)).sum())
            optimizer.step()
    assert torch.equal(head.weight, before)
    assert body.weight.grad.item() == pytest.approx(1.0)
