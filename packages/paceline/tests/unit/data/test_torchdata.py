"""torchdata's `StatefulDataLoader` is prepared like any other loader, and resumes with what it holds."""

from itertools import chain

import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline.data.prepare import prepare_loader

# It calls something of torch's that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")

ROWS = 20


class Stream(IterableDataset):
    """Numbers; it goes on where its state says."""

    def __init__(self):
        self.start = self.read = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for number in range(start, ROWS):
            self.read = number + 1
            yield number

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.start = state["read"]


def prepared(kind: str, workers: int):
    torch.manual_seed(5)
    data = Stream() if kind == "stream" else range(ROWS)
    loader = StatefulDataLoader(data, 3, shuffle=kind == "shuffled" or None, num_workers=workers)
    return prepare_loader(loader, width=1, index=0, device="cpu")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_resume_in_the_middle_of_an_epoch(kind, workers):
    loader = prepared(kind, workers)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.set_epoch(0)
    for step, _ in enumerate(loader, 1):
        if step == 3:
            state = loader.state_dict()
    again = prepared(kind, 2 - workers)
    again.load_state_dict(state)
    assert [[batch.tolist() for batch in again] for _ in range(2)] == [epochs[0][3:], epochs[1]]
    assert sorted(chain.from_iterable(epochs[0])) == list(range(ROWS))
