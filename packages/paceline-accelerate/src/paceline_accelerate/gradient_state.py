"""`GradientState`: the accumulation window and the loader that is being iterated, of one accelerator."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.data.active import ActiveLoaders
from paceline.optim.accumulate import Accumulation

if TYPE_CHECKING:
    from paceline.accelerator import Accelerator


class GradientState:
    """Shows the accumulation window of an accelerator; if there is no accelerator, it shows what a script has set.

    Args:
        gradient_accumulation_plugin: replaces the values of the plugin.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if not self._shared_state:
            self._shared_state.update(_empty())
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @classmethod
    def of(cls, accelerator: Accelerator, plugin: Any) -> GradientState:
        """Makes the state of one accelerator, which `GradientState()` shows from now on."""
        state = object.__new__(cls)
        # The reference is weak, because the class's dictionary must not keep the models of a finished run alive.
        state.__dict__ = {**_empty(), "_accelerator": weakref.ref(accelerator), "_plugin_kwargs": plugin.to_kwargs()}
        cls._shared_state.clear()
        cls._shared_state.update(state.__dict__)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # unpickling gives the state of the process that unpickles

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()

    @property
    def accelerator(self) -> Any:
        """The accelerator whose window this is; None where none was made, or it is gone."""
        reference = self.__dict__.get("_accelerator")
        return None if reference is None else reference()

    @property
    def accumulation(self) -> Accumulation | None:
        """The windows of that accelerator."""
        accelerator = self.accelerator
        return None if accelerator is None else accelerator.gradients

    def _own(self, name: str) -> Any:
        """Returns a value of this state's dictionary, which all states that a script constructs share."""
        try:
            return self.__dict__[name]
        except KeyError:
            reason = f"'GradientState' object has no attribute '{name.strip('_')}': it was reset"
            raise AttributeError(reason) from None

    @property
    def initialized(self) -> bool:
        """Whether there is a state to show."""
        return bool(self.__dict__)

    # -- the window --------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the window ends with this micro-batch."""
        accumulation = self.accumulation
        if accumulation is not None:
            return accumulation.sync
        return bool(self._own("_sync_gradients"))

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        accumulation = self.accumulation
        if accumulation is not None:
            accumulation.sync = value
        self.__dict__["_sync_gradients"] = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Values of the accumulation plugin that differ from its defaults, and the number of steps."""
        accumulation = self.accumulation
        values: dict[str, Any] = self._own("_plugin_kwargs")
        if accumulation is not None:
            values["num_steps"] = accumulation.steps
        return values

    @plugin_kwargs.setter
    def plugin_kwargs(self, values: dict[str, Any]) -> None:
        self.__dict__["_plugin_kwargs"] = dict(values)
        accumulation = self.accumulation
        if accumulation is not None and values.get("num_steps"):
            accumulation.set_steps(values["num_steps"])

    num_steps = property(lambda self: self.plugin_kwargs.get("num_steps", 1), doc="Micro-batches in a window.")
    adjust_scheduler = property(lambda self: self.plugin_kwargs.get("adjust_scheduler", False))
    sync_with_dataloader = property(lambda self: self.plugin_kwargs.get("sync_with_dataloader", True))
    is_xla_gradients_synced = False

    # -- the loader --------------------------------------------------------------------------------------------

    @property
    def active_loaders(self) -> ActiveLoaders:
        """The prepared loaders that are being iterated: those of the accelerator, or of scripts that have none."""
        accelerator = self.accelerator
        loaders: ActiveLoaders = self._own("_active_loaders") if accelerator is None else accelerator.run.active_loaders
        return loaders

    def _add_dataloader(self, dataloader: Any) -> None:
        """Adds a loader of a script that is being iterated; prepared loaders add themselves to the run."""
        self._own("_dataloaders").append(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        loaders = self._own("_dataloaders")
        loaders[:] = [loader for loader in loaders if loader is not dataloader]

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that is being iterated, or None."""
        added = self._own("_dataloaders")
        return added[-1] if added else self.active_loaders.top

    @property
    def dataloader_references(self) -> list[Any]:
        """None, for outside of all loops, and the loaders that are being iterated, the current one last."""
        return [None, *self.active_loaders.loaders, *self._own("_dataloaders")]

    @dataloader_references.setter
    def dataloader_references(self, loaders: list[Any]) -> None:
        self.__dict__["_dataloaders"] = [loader for loader in loaders if loader is not None]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its epoch."""
        loader = self.active_dataloader
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Real samples of a last batch that is not full; -1 outside of loops."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation plugin: {self.plugin_kwargs}\n"
        )


def _empty() -> dict[str, Any]:
    return {"_sync_gradients": True, "_plugin_kwargs": {}, "_dataloaders": [], "_active_loaders": ActiveLoaders()}
