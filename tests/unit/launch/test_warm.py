"""What is imported once, before processes are forked."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from types import ModuleType

from paceline.base.lazy import fast_imports


def test_what_scripts_for_a_library_need_is_imported():
    program = (
        "import sys; from paceline.launch.launchers.local import import_for_scripts\n"
        "door = 'paceline.compat.deepspeed.initialize'\n"
        "import_for_scripts(['']); assert 'torch' in sys.modules and door not in sys.modules\n"
        "import_for_scripts(['accelerate', 'deepspeed']); assert door in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_collection_goes_on_afterwards():
    with fast_imports():
        assert not gc.isenabled()
        with fast_imports():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_torch_gets_frames_without_source():
    source = "import inspect, sys\ndef here(): return inspect.getframeinfo(sys._getframe(1))\n"
    of_torch, of_another = ModuleType("torch._library.utils"), ModuleType("another")
    for module in (of_torch, of_another):
        exec(source, module.__dict__)
    plain = of_torch.here()
    with fast_imports():
        with fast_imports():
            assert of_torch.here().code_context is None
        info = of_torch.here()
        assert of_another.here().code_context is not None
    assert (info.filename, info.code_context) == (plain.filename, None)
    assert inspect.getframeinfo.__module__ == "inspect" and of_torch.here().code_context is not None
