"""`paceline verify`: does a script compute the same numbers under every plan as on one process, and if not, why?

verifier    runs the script: on one process, again on one process, under each plan, and in float64
recorder    what one process writes down while it runs: rows, losses, gradients, weights, logged values
recording   the format of that
compare     two runs, step by step: what differs first, and whether that is rounding (pure)
diagnose    the table of causes: evidence, sentence, fix (pure)
report      what is printed
"""
