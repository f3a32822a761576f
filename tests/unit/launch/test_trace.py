"""What stands in the traceback of a script that failed."""

from __future__ import annotations

from paceline.launch.worker.traceback_text import traceback_text


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_plain_tensor_that_met_a_divided_one_is_explained() -> None:
    text = traceback_text(
        raised(RuntimeError("aten.lerp_.Scalar: got mixed torch.Tensor and DTensor, need to convert"))
    )
    assert "[model-copy]" in text and "accelerator.prepare(model, average, optimizer)" in text


def test_other_errors_stay_as_they_are() -> None:
    assert traceback_text(raised(RuntimeError("no"))).endswith("RuntimeError: no\n")
