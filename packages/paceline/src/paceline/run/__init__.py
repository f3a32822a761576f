"""What `Accelerator` is made of: one object for each thing that a run does, and `Run`, which all of them share.

run             `Run`: the world, settings, plan, mesh and events of a run
starting        from the arguments of `Accelerator` to a `Run` with its process group
preparation     `prepare`: the plan is resolved, the model is changed, and its optimizers and loaders follow
prepared        the models, optimizers, loaders and schedulers that were prepared
preparable      what may be prepared, and what is said of everything else
steps           the backward pass, clipping, and steps that the run does itself
states          saving, resuming and loading
preemption      a notice that the machine goes away: the run saves and ends
evaluation_stop the same during an evaluation, where ranks take different numbers of steps
observers       what looks at the run where a setting asks for it; it belongs to other parts
"""
