"""Every private name of torch that Paceline uses, one function each; those of one part alone are in its own `torch_internals`.

A private name may change in any release of torch. Here it is in one place, and a contract test
(`tests/unit/torch_internals/` of each part) says what we rely on: `make test-torch TORCH=2.15.0` runs these tests under another
release, and a failing one names what changed. `world` and `data` use no other private names; packages that still do
move theirs here when they are next changed.
"""
