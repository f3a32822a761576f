"""Changes libraries that scripts for accelerate use beside it, where their results would be wrong under a plan.

Only what right numbers need stands here, each with its reason in `install`. The functions themselves are in `divided_models`.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from paceline.base.log import warn_once
from paceline_accelerate.divided_models import (
    encode_with_whole_models,
    generate_with_whole_models,
    resume_undivided_models,
    save_whole_models,
    sync_whole_models,
    train_divided_encoders,
)

# The oldest releases with which programs were compared, step by step, with the same programs under accelerate.
OLDEST_TRIED = {"transformers": "4.57.6", "peft": "0.18.0"}


class Mender(MetaPathFinder):
    """A finder that changes modules right after they are imported.

    Args:
        mend: name of a module -> function that is called with the module after its import.
    """

    def __init__(self, mend: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.mend = mend
        self._unfinished: list[str] = []
        self._sought: set[str] = set()

    def mend_imported(self, name: str) -> None:
        """Changes an imported module at once; one that is still being imported is changed at a later import."""
        module = sys.modules[name]
        # transformers imports accelerate, and with it an installed door, in the middle of some of its own modules.
        if getattr(module.__spec__, "_initializing", False):
            self._unfinished.append(name)
        else:
            self.mend[name](module)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of the other finders, with a loader that also changes the module it has loaded."""
        unfinished, self._unfinished = self._unfinished, []
        for earlier in unfinished:
            self.mend_imported(earlier)
        # Another finder of this kind asks all others in turn, this one too.
        if name not in self.mend or name in self._sought:
            return None
        self._sought.add(name)
        try:
            spec = self._spec_of_others(name, path, target)
        finally:
            self._sought.discard(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                # Not always `module`: lazy modules replace themselves.
                self.mend[name](sys.modules[name])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _spec_of_others(self, name: str, path: Sequence[str] | None, target: Any) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec:
                    return spec
        return None


def install(*, found_before: bool = False) -> None:
    """Puts the finder in place, and changes what is imported already.

    Args:
        found_before: accelerate was there before it was served, as where its door is installed; then no library that was
            imported meanwhile can have taken it for missing.
    """
    if any(isinstance(finder, Mender) for finder in sys.meta_path):
        return
    mend: dict[str, Callable[[ModuleType], None]] = {
        # `save_pretrained` writes the parameters of the module. Under `shard` or `tp` they are the parts of this rank, and the
        # file would hold a part of the model.
        "transformers.modeling_utils": save_whole_models,
        "peft.peft_model": save_whole_models,
        # It runs the model outside of `forward` of the prepared one, and as often as the rank's own texts need: with parts
        # of parameters, ranks would wait for each other for ever.
        "transformers.generation.utils": generate_with_whole_models,
        # A checkpoint of a divided model has its weights in another file. The trainer would not find it, and where no plan
        # divides the model it would go on from other weights.
        "transformers.trainer": resume_undivided_models,
        # It mixes the weights of two models. Under a plan these are parts that do not belong together.
        "trl.trainer.callbacks": sync_whole_models,
        # As for `generate`: `encode` and `predict` run the model as often as the rank's own texts need.
        "sentence_transformers.base.model": encode_with_whole_models,
        "sentence_transformers.cross_encoder.model": encode_with_whole_models,
        "sentence_transformers.multi_vector_encoder.model": encode_with_whole_models,
        "sentence_transformers.sentence_transformer.model": encode_with_whole_models,
        "sentence_transformers.sparse_encoder.model": encode_with_whole_models,
        # All ranks write the same folder, and loading reads whole values into parts.
        "sentence_transformers.base.trainer": train_divided_encoders,
    }
    # The first of all finders, because it wraps what the others return.
    mender = Mender(mend)
    sys.meta_path.insert(0, mender)
    # Modules that were imported before this call never come to the finder.
    for name in mend.keys() & sys.modules.keys():
        mender.mend_imported(name)
    if "transformers.utils.import_utils" in sys.modules and not found_before:
        warn_once(
            "compat",
            "transformers was imported before accelerate's names were served, and may take it for missing (its Trainer "
            "will): call `paceline.compat.install` first.",
        )


def too_old() -> list[str]:
    """Returns a sentence for each installed library that is older than the oldest tried release."""
    notices = []
    for package, oldest in OLDEST_TRIED.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if _numbers(version) < _numbers(oldest):
                notices.append(
                    f"{package} {version} is older than {oldest}, the oldest release that was tried with Paceline. If "
                    f"something of it fails: `pip install --upgrade {package}`"
                )
    return notices


def _numbers(version: str) -> list[int]:
    """Returns the first three numbers of a version, to compare it; what follows ("rc1", "dev0") does not count."""
    numbers = re.findall(r"\d+", version)[:3]
    return list(map(int, numbers))
