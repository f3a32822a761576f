"""`BareVerifier` judges a script without Paceline, in this order.

one process            the reference, with parts of its tensors as ranks may hold them
one process, again     what differs here is not due to ranks
nudged                 one process, its initial weights changed by one rounding: how far does rounding go?
each width             the script as it is; if the ranks read more samples together, with batch sizes divided by their number
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline_lens.verify.bare.account import Account
from paceline_lens.verify.bare.causes import diagnose_account, diagnose_alone
from paceline_lens.verify.case import RunFailed, VerifyCase
from paceline_lens.verify.compare import EPS
from paceline_lens.verify.launched import LaunchedRuns
from paceline_lens.verify.recording import Recording
from paceline_lens.verify.result import Result, Status


class BareVerifier:
    """Verifies one script.

    Args:
        runs: runs it.
        tell: called with one line before each run.
    """

    def __init__(self, runs: LaunchedRuns, tell: Callable[[str], object] = lambda line: None) -> None:
        self._runs = runs
        self._tell = tell

    def verify(self, cases: Sequence[VerifyCase]) -> list[Result]:
        """Runs and compares everything; the first result is that of one process."""
        alone = VerifyCase(1)
        parts = sorted({part for case in cases for part in range(2, case.procs + 1) if case.procs % part == 0})
        try:
            self._tell("1 process, the reference")
            reference = self._runs.run_bare(alone, parts=parts)[0]
            self._tell("1 process, once more")
            again = self._runs.run_bare(alone, parts=parts, again=True)[0]
        except RunFailed as error:
            return [Result(alone, "failed", why=str(error))]
        repeat = _judged(alone, Account(reference, [again]), alone=True)
        if any(cause.startswith("unseeded") for cause in repeat.causes):
            return [repeat]
        nudged = self._nudged(reference)
        return [repeat, *(self._compared(case, reference, nudged) for case in cases if case.procs > 1)]

    def _nudged(self, reference: Recording) -> Recording | None:
        self._tell("1 process, weights changed by one rounding")
        try:
            return self._runs.run_bare(VerifyCase(1), nudge=EPS.get(reference.dtype, EPS["float32"]))[0]
        except RunFailed:
            return None  # then a difference of the first step decides, as in two runs on one process

    def _compared(self, case: VerifyCase, reference: Recording, nudged: Recording | None) -> Result:
        if case.settings:
            return Result(case, "failed", why="the script has no `Accelerator`, so that no plan can be applied to it")
        self._tell(case.name)
        try:
            account = Account(reference, self._runs.run_bare(case), nudged)
            if account.rows == "more":
                # Most scripts mean the batch of one rank. The global batch has to be that of one process.
                self._tell(f"{case.name}, with batch sizes divided by {case.procs}")
                divided = Account(reference, self._runs.run_bare(case, share=case.procs), nudged, shared=True)
                # A script that makes its batches without a DataLoader still reads more: then the first run says more.
                if divided.rows != "more":
                    account = divided
        except RunFailed as error:
            return Result(case, "failed", why=str(error))
        return _judged(case, account)


def _judged(case: VerifyCase, account: Account, *, alone: bool = False) -> Result:
    """Makes a result of an account."""
    findings = diagnose_alone(account) if alone else diagnose_account(account)
    status: Status = "same"
    why = ""
    if any(finding.cause.is_error for finding in findings):
        status = "different"
    elif not account.compares_gradients:
        status = "failed"
        why = "gradients were compared between ranks only, since the samples are not those of one process"
    elif len(account.reference) != account.num_steps:
        status = "different"
        why = f"it took {account.num_steps} steps, and one process {len(account.reference)}"
    largest: dict[str, tuple[float, float | None]] = {}
    if account.rows in ("more", "other"):
        largest["rows"] = (1.0, None)
    if account.largest:
        largest["gradient"] = (account.largest, None)
    compared = ("rows", "gradient") if account.compares_gradients else ("rows",)
    return Result(case, status, why, findings=findings, largest=largest, steps=account.num_steps, compared=compared)
