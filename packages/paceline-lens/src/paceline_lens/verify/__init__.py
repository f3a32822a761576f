"""`paceline verify`: does a script compute the same numbers under every plan as on one process, and if not, why?

verifier    runs the script: on one process, again on one process, under each plan, and in float64
bare        the same for scripts without Paceline
isolation   which samples, tokens and documents act on each other in a model
receipts    whether weights arrived where they were handed to
recorder    what one process writes down while it runs: rows, losses, gradients, weights, logged values
recording   the format of that
compare     two runs, step by step: what differs first, and whether that is rounding (pure)
diagnose    the table of causes: evidence, sentence, fix (pure)
report      what is printed
"""

from __future__ import annotations

from paceline_lens.verify.isolation import IsolationReport, Leak, isolation
from paceline_lens.verify.receipts import Receipt, receipt

__all__ = ["IsolationReport", "Leak", "Receipt", "isolation", "receipt"]
