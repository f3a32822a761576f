"""`paceline verify` for a script without Paceline: torchrun, DDP, FSDP2, collectives by hand.

recorder   what one process writes down while the script runs: inputs, losses, gradients before and after their reduction
units      which tensor, or which part of a tensor, of one process each rank holds (pure)
account    what became of each gradient on the way from the backward pass to the optimizer (pure)
causes     the table of causes: evidence, sentence, fix (pure)
verifier   runs the script on one process and on several, and judges
"""
