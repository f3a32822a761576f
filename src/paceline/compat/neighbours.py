"""Repairs libraries that scripts for accelerate also import and whose current release, or absence, would stop the script.

deepspeed       imported without need: a module whose every name raises `CompatError`, where it is not installed
transformers    `AdamW`, and `encode_plus` of tokenizers, which its fifth release dropped: put back, with a warning;
                a DeepSpeed config without DeepSpeed's names: a coded error; imported with less work
                (`transformers_imports`), and its default collation made faster (`collation`)
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from paceline.base.errors import CompatError
from paceline.base.log import warn_once
from paceline.compat.absent import AbsentModule
from paceline.compat.collation import collate_through_arrays
from paceline.compat.divided_models import (
    encode_with_whole_models,
    generate_with_whole_models,
    resume_undivided_models,
    save_whole_models,
    sync_whole_models,
    train_divided_encoders,
)
from paceline.compat.served import only_asked
from paceline.compat.transformers_imports import DETECTION_LOSSES, scan_models_once, without_scipy

_ABSENT = {
    "deepspeed": (
        "it is not installed, and a script for accelerate imports it without need",
        'pass `Accelerator` a plan (native: `Accelerator(plan={"shard": 4})`), or install deepspeed and leave out --compat',
    ),
}

# The oldest releases with which programs were compared, step by step, with the same programs under accelerate.
OLDEST_TRIED = {"transformers": "4.57.6", "peft": "0.18.0"}


class Mender(MetaPathFinder):
    """A finder that changes modules right after they are imported.

    Args:
        mend: name of a module -> function that is called with the module after its import.
        around: name of a module -> context in which the module is imported.
    """

    def __init__(
        self,
        mend: Mapping[str, Callable[[ModuleType], None]],
        around: Mapping[str, Callable[[ModuleType], AbstractContextManager[None]]],
    ) -> None:
        self.mend = mend
        self.around = around
        self._unfinished: list[str] = []

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
        if name not in self.mend and name not in self.around:
            return None
        spec = self._spec_of_others(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with self.around.get(name, nullcontext)(module):
                    load(module)
                if name in self.mend:
                    self.mend[name](sys.modules[name])  # which need not be `module`: lazy ones replace themselves

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _spec_of_others(self, name: str, path: Sequence[str] | None, target: Any) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec:
                    return spec
        return None


class AbsentFinder(MetaPathFinder, Loader):
    """Comes last, and so finds only what is not installed. Who merely asks whether it is there is told no."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Returns a spec for the libraries of the table and what lies in them."""
        is_absent = name.partition(".")[0] in _ABSENT
        if not is_absent or only_asked():
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns a module that raises."""
        return AbsentModule(spec.name, *_ABSENT[spec.name.partition(".")[0]])

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: an absent module has no code."""


def install(*, found_before: bool = False) -> None:
    """Puts both finders in place, and mends what is imported already.

    Args:
        found_before: accelerate was there before it was served, as where its door is installed; then no library that was
            imported meanwhile can have taken it for missing.
    """
    if any(isinstance(finder, Mender) for finder in sys.meta_path):
        return
    mend: dict[str, Callable[[ModuleType], None]] = {
        "trl.trainer.callbacks": sync_whole_models,
        "transformers": _look_at_transformers,
        "transformers.data.data_collator": collate_through_arrays,
        "transformers.generation.utils": generate_with_whole_models,
        "transformers.integrations.deepspeed": _explain_deepspeed,
        "transformers.modeling_utils": save_whole_models,
        "transformers.trainer": resume_undivided_models,
        "transformers.tokenization_utils_base": _give_encode_plus,
        "transformers.utils.import_utils": _mend_import_utils,
        "peft": _look_at_age,
        "peft.peft_model": save_whole_models,
        "sentence_transformers.base.model": encode_with_whole_models,
        "sentence_transformers.base.trainer": train_divided_encoders,
        "sentence_transformers.cross_encoder.model": encode_with_whole_models,
        "sentence_transformers.multi_vector_encoder.model": encode_with_whole_models,
        "sentence_transformers.sentence_transformer.model": encode_with_whole_models,
        "sentence_transformers.sparse_encoder.model": encode_with_whole_models,
    }
    # The one first, because it wraps what other finders return; the other last, because it may find only what they do not.
    mender = Mender(mend, dict.fromkeys(DETECTION_LOSSES, without_scipy))
    sys.meta_path.insert(0, mender)
    sys.meta_path.append(AbsentFinder())
    # Modules that were imported before this call never come to the finder.
    for name in mend.keys() & sys.modules.keys():
        mender.mend_imported(name)
    if "transformers.utils.import_utils" in sys.modules and not found_before:
        warn_once(
            "compat",
            "transformers was imported before accelerate's names were served, and may take it for missing (its Trainer "
            "will): call `paceline.compat.install` first.",
        )


def too_old(*names: str) -> list[str]:
    """Returns a sentence for each library that is older than the oldest tried release; without names it looks at all."""
    notices = []
    for package, oldest in OLDEST_TRIED.items():
        if names and package not in names:
            continue
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if _numbers(version) < _numbers(oldest):
                notices.append(
                    f"{package} {version} is older than {oldest}, the oldest release that was tried with Paceline. If "
                    f"something of it fails: `pip install --upgrade {package}`"
                )
    return notices


def _look_at_age(module: ModuleType) -> None:
    for notice in too_old(module.__name__):
        warn_once("compat", notice)


def _look_at_transformers(module: ModuleType) -> None:
    _look_at_age(module)
    _give_adamw(module)


def _explain_deepspeed(module: ModuleType) -> None:
    """Replaces transformers' check of DeepSpeed's version by one whose error says what is missing."""
    check = module.dep_version_check

    def checked(library: str, *args: Any) -> Any:
        try:
            return check(library, *args)
        except importlib.metadata.PackageNotFoundError:
            if library != "deepspeed":
                raise
            raise CompatError(
                "compat-door",
                "a DeepSpeed config was given, and DeepSpeed's names are not served.",
                why="--compat (or the installed door) names accelerate alone, and DeepSpeed itself is not installed",
                fix="serve both: `paceline launch --compat accelerate,deepspeed ...`, or `paceline doors install deepspeed`",
            ) from None

    module.dep_version_check = checked  # type: ignore[attr-defined]


def _numbers(version: str) -> list[int]:
    """Returns the first three numbers of a version, to compare it; what follows ("rc1", "dev0") does not count."""
    numbers = re.findall(r"\d+", version)[:3]
    return list(map(int, numbers))


def _give_adamw(transformers: ModuleType) -> None:
    """Adds `transformers.AdamW`, which newer releases no longer have and older scripts use."""
    if not hasattr(transformers, "AdamW"):
        from paceline.compat.adamw import AdamW

        transformers.AdamW = AdamW  # type: ignore[attr-defined]


def _mend_import_utils(module: ModuleType) -> None:
    scan_models_once(module)
    _give_adamw_again(module)


def _give_adamw_again(module: ModuleType) -> None:
    """Adds `AdamW` to each lazy module with which transformers replaces itself.

    transformers constructs such a module a second time for its models, and the first addition would be lost.
    """
    lazy_module = module._LazyModule
    initialise = lazy_module.__init__

    @functools.wraps(initialise)
    def initialise_and_give(self: Any, name: str, *args: Any, **options: Any) -> None:
        initialise(self, name, *args, **options)
        if name == "transformers":
            _give_adamw(self)

    lazy_module.__init__ = initialise_and_give


def _give_encode_plus(module: ModuleType) -> None:
    """Adds methods of tokenizers that newer releases of transformers no longer have."""
    tokenizer = module.PreTrainedTokenizerBase

    def encode_plus(self: Any, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """Calls the tokenizer."""
        warn_once("compat", "transformers no longer has `tokenizer.encode_plus`; `tokenizer(...)` is called instead.")
        return self(text, text_pair, **options)

    for name in ("encode_plus", "batch_encode_plus"):
        if not hasattr(tokenizer, name):
            setattr(tokenizer, name, encode_plus)
