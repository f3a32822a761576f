"""The books: what came, went and was resized, the peak, and kinds that are known only afterwards."""

import torch

from paceline.planner.ledger import Ledger, parts
from paceline.planner.witness import Witness


def test_the_peak_is_the_most_that_lived_at_once():
    ledger = Ledger()
    with Witness(ledger):
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second * 2
    peak = ledger.peak()
    assert peak.total == 8000  # two of them at a time, never three
    del second, third
    assert ledger.peak(ledger.mark).total == 0


def test_kinds_are_put_on_afterwards_and_the_stronger_one_counts():
    ledger = Ledger()
    with Witness(ledger):
        weight = torch.zeros(100)
        gradient = torch.ones(100)
        scratch = torch.ones(50)
    ledger.label([gradient], "communication")
    ledger.label([weight], "parameters")
    ledger.label([gradient], "gradients")
    ledger.label([weight], "communication")
    found = ledger.peak().at_peak
    assert {name: count for name, count in found.items() if count} == {
        "parameters": 400,
        "gradients": 400,
        "activations": 200,
    }
    del scratch


def test_a_part_of_a_run_has_its_own_peak():
    ledger = Ledger()
    with Witness(ledger):
        torch.zeros(1000)
        kept = torch.zeros(10)
        mark = ledger.mark
        more = torch.zeros(20)
    assert ledger.peak().total == 4000
    assert ledger.peak(mark).total == 120
    del kept, more


def test_views_share_and_resizing_counts():
    ledger = Ledger()
    with Witness(ledger):
        whole = torch.zeros(100)
        view = whole[:50]
    assert ledger.peak().total == 400
    whole.untyped_storage().resize_(0)
    ledger.resized(whole.untyped_storage())
    assert ledger.peak(ledger.mark).total == 0
    del view


def test_parts_of_what_is_no_tensor():
    tensor = torch.zeros(1)
    assert parts(None) == [] and parts(tensor)[0] is tensor
