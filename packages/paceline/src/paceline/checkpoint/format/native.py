"""Our own checkpoints: a manifest, `state.json`, and tensors in the format of torch's distributed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import WriterPeers, agreed
from paceline.checkpoint.format.checkpoint_format import CheckpointFormat
from paceline.checkpoint.format.manifest import NAME, STATE, Manifest, read_json, verify
from paceline.checkpoint.store import Store

if TYPE_CHECKING:
    from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.weights.sources import Weights


class NativeFormat(CheckpointFormat):
    """What `Checkpointer` saves, by `NativeWriter`."""

    name = "native"
    has_manifest = True

    def recognises(self, store: Store, folder: str) -> bool:
        """Returns whether there is a manifest, sound or not."""
        return store.exists(store.join(folder, NAME))

    def record(self, store: Store, folder: str) -> Manifest | None:
        return Manifest.find(store, folder)

    def open(
        self, store: Store, folder: str, state: TrainState, peers: WriterPeers, manifest: Manifest | None
    ) -> OpenCheckpoint:
        """Reads the index and `state.json`. Ranks: all."""
        from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
        from paceline.checkpoint.format.shards import read_index, read_shards, shapes

        assert manifest is not None, "it was compared with the files before"
        place = manifest.place(store, folder)
        index = agreed(peers, f"reading the index of {folder}", lambda: read_index(store, place))
        saved = agreed(peers, f"reading {STATE} of {folder}", lambda: read_json(store, store.join(place, STATE)))
        read = partial(read_shards, store, place, index, manifest.files)
        return OpenCheckpoint(state, saved, shapes(index), read)

    def weights(self, store: Store, folder: str, model: str) -> Weights | None:
        """Returns the tensors of one model, whose files are there in full length."""
        from paceline.checkpoint.format.shards import read_index
        from paceline.checkpoint.weights.sources import DividedWeights

        if not self.recognises(store, folder):
            return None
        manifest = Manifest.read(store, folder)
        problems = verify(folder, store, names=(), manifest=manifest)
        if problems:
            raise CheckpointError.of(problems)
        place = manifest.place(store, folder)
        index = read_index(store, place)
        names = {name.split("/")[1] for name in index.state_dict_metadata if name.startswith("models/")}
        models = sorted(names)
        chosen = model
        if not model and len(models) == 1:
            chosen = models[0]
        if chosen not in models:
            raise _no_such_model(folder, model, models)
        return DividedWeights(store, place, f"models/{chosen}/", index)

    def tied_names(self, store: Store, folder: str) -> Mapping[str, str]:
        place = Manifest.read(store, folder).place(store, folder)
        models = read_json(store, store.join(place, STATE))["models"]
        aliases_of_models: list[dict[str, str]] = [model["aliases"] for model in models.values()]
        return aliases_of_models[0] if aliases_of_models else {}


def _no_such_model(folder: str, model: str, models: list[str]) -> CheckpointError:
    none_of_them = f", none of them {model}." if model else "."
    what = f"the checkpoint {folder} holds {len(models)} models{none_of_them}"
    if not models:
        why = "the run that saved it had prepared none"
        fix = "name a checkpoint that holds a model"
    else:
        why = f"they are called {', '.join(models)}"
        fix = f"say which: {models[0]}, for instance"
    return CheckpointError("checkpoint-missing", what, why=why, fix=fix)


CHECKPOINT_FORMAT = NativeFormat()
