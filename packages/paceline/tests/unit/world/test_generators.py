"""States of generators: what is put back is drawn again."""

import torch

from paceline.world.generators import generator_states, restore_generators

CPU = torch.device("cpu")


def test_the_same_numbers_are_drawn_again():
    states = generator_states(CPU)
    drawn = torch.rand(3)
    restore_generators(states, CPU)
    assert len(states) == 1 and torch.equal(torch.rand(3), drawn)


def test_a_device_has_a_state_of_its_own(monkeypatch):
    """The device is named: a process may have made another one current since."""
    seen = []

    class Device:
        @staticmethod
        def get_rng_state(device):
            return torch.tensor([device.index], dtype=torch.uint8)

        @staticmethod
        def set_rng_state(state, device):
            seen.append((state.tolist(), device))

    monkeypatch.setattr(torch, "get_device_module", lambda device: Device)
    device = torch.device("cuda", 3)
    states = generator_states(device)
    restore_generators(states, device)
    assert seen == [([3], device)]
