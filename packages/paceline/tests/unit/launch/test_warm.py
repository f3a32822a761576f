"""What is imported once, before processes are forked."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from paceline.base.lazy import fast_imports


@pytest.mark.needs("accelerate", "deepspeed")
def test_what_scripts_for_a_library_need_is_imported():
    program = (
        "import sys; from paceline.launch.launchers.local import import_for_scripts\n"
        "door = 'paceline_deepspeed.initialize'\n"
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
