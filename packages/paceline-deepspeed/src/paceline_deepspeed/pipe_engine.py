"""`PipelineEngine`: DeepSpeed's `train_batch` and `eval_batch` on our pipeline strategy.

train_batch   micro-batches of one step, pulled by every rank that has an iterator
                -> all ranks agree how many came: all run, or all raise StopIteration
                -> forward and backward of all, by the schedule -> one step
                -> the mean loss over micro-batches and replicas, on every rank
eval_batch    the same micro-batches forward
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from paceline.base.errors import DataError, TrainError
from paceline.base.log import warn_once
from paceline.config.given import Given
from paceline.parallel.microbatches import Microbatches
from paceline.parallel.strategy import Runner
from paceline.precision.policy import to_float32
from paceline.world.tree import first_rows, map_leaves, to_device
from paceline_deepspeed.config import Batch, DeepSpeedConfig
from paceline_deepspeed.engine import DeepSpeedEngine
from paceline_deepspeed.loader import loader_of
from paceline_deepspeed.pipe import PipelineModule
from paceline_deepspeed.topology import PipelineParallelGrid

_FAILED = -1  # in the place of a count: this rank's iterator raised an error


def _refused(name: str) -> Callable[..., NoReturn]:
    """Makes a method that refuses: a pipeline runs forward, backward and step of its stages together."""

    def refuse(self: PipelineEngine, *args: Any, **kwargs: Any) -> NoReturn:
        raise TrainError(
            "pipe-train-batch",
            "Only train_batch() is accessible in pipeline mode.",
            why=f"`engine.{name}` was called, but a pipeline runs forward, backward and step of its stages together",
            fix="write `loss = engine.train_batch(data_iter)`, and `engine.eval_batch(data_iter)` to evaluate",
        )

    return refuse


class PipelineEngine(DeepSpeedEngine):
    """Trains a `PipelineModule`. Arguments are those of `DeepSpeedEngine`.

    Attributes:
        grid: which stage and replica this rank is.
    """

    pipeline_parallelism = True
    module: PipelineModule
    _metric_fix = "leave `scheduler` out, and step one of the script's own: `ReduceLROnPlateau(engine.optimizer)`"

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.grid: PipelineParallelGrid = self.module.mpu()
        interval = self.config["pipeline.activation_checkpoint_interval"]
        if interval:
            self.module.activation_checkpoint_interval = interval
        # partition_method="profile": only `prepare`, with the measured times, has divided the layers.
        if self.module.parts is None:
            self.module.parts = [*self._runner().begins, len(self.module.layer_names)]
        self._data: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self._last_print = time.perf_counter()
        self.agg_train_loss: torch.Tensor | None = None
        if self.training_dataloader is not None:
            self._data = _repeated(self.training_dataloader)

    # -- how it is made --------------------------------------------------------------------------------------------

    @classmethod
    def trains(cls, config: DeepSpeedConfig, optimizer: Any) -> bool:
        """Whether the model is prepared to be trained: always, since its layers can be divided over stages only once."""
        return True

    @classmethod
    def settings(cls, model: nn.Module, batch: Batch, training_data: Any = None, collate_fn: Any = None) -> list[Given]:
        """Lists the stages, and one window for a whole step, since a schedule runs all of its micro-batches."""
        assert isinstance(model, PipelineModule)
        place = f"PipelineModule(num_stages={model.num_stages})"
        settings: dict[str, Any] = {"accumulate": 1}
        if model.num_stages > 1:
            names = model.layer_names
            # 1F1B needs a micro-batch for each stage at least.
            schedule = "gpipe"
            if batch.accumulate >= model.num_stages:
                schedule = "1f1b"
            settings["pp"] = model.num_stages
            settings["options.pipeline.blocks"] = names
            settings["options.pipeline.schedule"] = schedule
            settings["options.pipeline.microbatches"] = batch.accumulate
            if model.parts is not None:
                settings["options.pipeline.split"] = [names[begin] for begin in model.parts[1:-1]]
            else:
                inputs = _example(model, batch, training_data, collate_fn)
                settings["options.pipeline.split"] = "time"
                settings["options.pipeline.weights"] = model.measure(inputs)
        return [Given(name, value, "code", place) for name, value in settings.items()]

    @classmethod
    def width(cls, model: nn.Module, world: int) -> int:
        """Returns how many of `world` ranks read different samples: those of one stage."""
        assert isinstance(model, PipelineModule)
        return world // model.num_stages

    @classmethod
    def shuffles(cls) -> bool:
        """Whether a loader of `training_data` is shuffled."""
        return False

    def _rebatch(self, micro: int, accumulate: int) -> None:
        super()._rebatch(micro, accumulate)
        # A schedule runs all micro-batches of a step in one call, and divides their losses itself.
        self.accelerator.gradient_accumulation_steps = 1

    # -- where it stands -------------------------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return self.module.num_stages

    @property
    def micro_batch_size(self) -> int:
        return self.batch.micro

    @property
    def micro_batches(self) -> int:
        return self.batch.accumulate

    @property
    def stage_id(self) -> int:
        return self.grid.stage_id

    @property
    def is_pipe_parallel(self) -> bool:
        return self.num_stages > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.grid.model_parallel_size > 1

    def is_first_stage(self) -> bool:
        return self.grid.is_first_stage()

    def is_last_stage(self) -> bool:
        return self.grid.is_last_stage()

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    # -- what DeepSpeed's stages are told about their messages: ours find it out at every step --

    def reset_activation_shape(self) -> None:
        """Does nothing: shapes are exchanged with the tensors."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Does nothing: a mask travels like any other tensor."""

    def log_for_device(self, *msg: Any) -> None:
        """Prints nothing, as DeepSpeed does unless its own source is changed."""

    # -- data ------------------------------------------------------------------------------------------------------

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Takes a function that makes `(inputs, labels)` of what an iterator gives."""
        self._batch_fn = fn

    def set_dataloader(self, loader: Any) -> None:
        """Takes a loader for the steps to come, over and over. On ranks between the first and the last stage it may lack."""
        self.training_dataloader = loader
        self._data = None
        if loader is not None:
            self._data = _repeated(loader)

    def _pull(self, iterator: Iterator[Any] | None, count: int) -> list[Any]:
        """Takes `count` micro-batches, `(inputs, labels)` each, to the device. Ranks: all.

        A rank without an iterator learns what the others have, and gets no values: only the first stage computes with
        inputs, and only the last with labels.

        Raises:
            StopIteration: on all ranks, where one of them has no more; the error of an iterator, on its rank.
            DataError, TrainError: `pipe-data`, `pipe-batch`, `pipe-iterator`.
        """
        batches: list[Any] = []
        error: Exception | None = None
        try:
            while iterator is not None and len(batches) < count:
                batch = next(iterator)
                if self._batch_fn is not None:
                    batch = self._batch_fn(batch)
                batches.append(to_device(_pair(batch), self.accelerator.device))
        except StopIteration:
            pass  # the ranks agree below that one has no more
        except Exception as raised:
            error = raised  # raised once the other ranks know of it, which would wait for this one
        has_data = iterator is not None
        num_pulled = len(batches)
        if not has_data:
            num_pulled = count  # nothing is missing on a rank that reads nothing
        if error is not None:
            num_pulled = _FAILED
        # Shape [ranks, 2]: the number of micro-batches, and whether the rank has an iterator.
        pulled_by_rank = self.accelerator.collectives.gather(torch.tensor([[num_pulled, has_data]])).tolist()
        self._agree(pulled_by_rank, count, error)
        if not all(rank_has_data for _, rank_has_data in pulled_by_rank):
            batches = self._share(batches)
        if batches:
            first_inputs, _ = batches[0]
            self._compare_rows((first_inputs,), {})
            self.accelerator.run.events.micro_batch(first_inputs, self.batch.train)
        return batches

    def _agree(self, pulled_by_rank: list[list[int]], count: int, error: Exception | None) -> None:
        """Raises on every rank where some rank cannot train the batch.

        Args:
            pulled_by_rank: for each rank, how many micro-batches it has pulled (or `_FAILED`), and whether it has an iterator.
            count: how many it takes.
            error: of this rank's own iterator.

        Raises:
            StopIteration, DataError, TrainError: as `_pull` says.
        """
        if error is not None:
            raise error
        failed: list[int] = []
        lacking: list[int] = []
        for rank, (num_pulled, has_data) in enumerate(pulled_by_rank):
            if num_pulled == _FAILED:
                failed.append(rank)
            if not has_data and self._stage_of(rank) in (0, self.num_stages - 1):
                lacking.append(rank)
        if failed:
            raise TrainError(
                "pipe-iterator",
                f"the iterator of rank {failed[0]} raised an error, so no rank trains this batch.",
                why="its traceback is printed by that rank",
                fix="correct the loader; the step can be repeated, other ranks' iterators have advanced",
            )
        if lacking:
            raise DataError(
                "pipe-data",
                f"rank {lacking[0]} holds the first or the last stage, and has no data.",
                why="neither `train_batch(data_iter)`, `set_dataiterator`, `set_dataloader` nor "
                "`initialize(training_data=...)` gave it any",
                fix="pass the same iterator on all ranks: `engine.train_batch(data_iter=iter(loader))`",
            )
        if any(num_pulled < count for num_pulled, _ in pulled_by_rank):
            raise StopIteration

    def _runner(self) -> Runner:
        """What runs the stages; a model of one stage has none."""
        entry = self.accelerator.run.prepared.find(self.prepared_model)
        assert entry is not None and entry.chain.runner is not None
        return entry.chain.runner

    def _stage_of(self, rank: int) -> int:
        return int(getattr(self.grid.topology().get_coord(rank), "pipe", 0))

    def _share(self, batches: list[Any]) -> list[Any]:
        """Shapes of the first stage's inputs, for ranks that read nothing. Ranks: all along `pp`."""
        group = self._runner().owners
        own_shapes: list[Any] | None = None
        if group.rank == 0:
            own_shapes = [map_leaves(_without_values, inputs) for inputs, _ in batches]
        # Also ranks that have batches take part: the broadcast is a collective of the whole group.
        shapes = group.broadcast_object(own_shapes)
        if batches:
            return batches
        return [(inputs, None) for inputs in shapes]

    def _compare_rows(self, inputs: tuple[Any, ...], keywords: Any) -> None:
        """Says once where micro-batches are larger than the config's."""
        rows = first_rows(inputs)
        batch = self.batch
        if rows is not None and rows > batch.micro:
            total = rows * batch.accumulate * batch.width
            warn_once(
                "compat",
                f"train_batch pulls {batch.accumulate} micro-batches, which came with {rows} rows each, but a micro-batch is "
                f"{batch.micro}: a step sees {total} samples, and train_batch_size is {batch.train}. Give the loader "
                f"batch_size={batch.micro} (`engine.train_micro_batch_size_per_gpu()`).",
            )

    # -- a step ----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Takes one step on as many micro-batches as it accumulates.

        Args:
            data_iter: gives micro-batches, `(inputs, labels)` each; None takes the one that was set, or the training data.

        Returns the mean loss over micro-batches and replicas, on every rank.

        Ranks: all.

        Raises:
            StopIteration: on all ranks, before anything is computed, where an iterator is exhausted.
            TrainError, DataError: `pipe-gradients`, and those of `_pull`.
        """
        if not torch.is_grad_enabled():
            raise TrainError(
                "pipe-gradients",
                "train_batch() requires gradients enabled. Use eval_batch() instead.",
                why="it was called under torch.no_grad()",
                fix="call it outside of the block",
            )
        self._needs_optimizer("train_batch")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.train()
        self.attendance.begins(self.micro_steps + 1)
        batches = Microbatches(self._pull(self._data, self.batch.accumulate))
        self.accelerator.gradients.sync = True
        own_loss = self.accelerator.forward_backward(self.prepared_model, batches, self._loss)
        self._num_passes += 1
        loss: torch.Tensor = self.accelerator.run.data_ranks.reduce(own_loss, "mean")
        self.agg_train_loss = loss
        # The schedule ran the whole window, of which the step counts the last micro-batch.
        self.micro_steps += self.batch.accumulate - 1
        super().step()
        self._tell(loss)
        return loss

    def get_additional_losses(self) -> None:
        """None: a loss function gives one loss here."""

    def _loss(self, output: Any, labels: object) -> Any:
        if self.module.loss_fn is None:
            return output
        return self.module.loss_fn(output, labels)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its window."""
        return (self.steps_in_window + 1) % self.batch.accumulate == 0

    def _tell(self, loss: torch.Tensor) -> None:
        """Gives the loss to the monitors, and prints a line at every `steps_per_print` steps."""
        if not self.accelerator.is_main_process:
            return
        if self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/train_loss", loss.item(), self.global_samples)])
        every = self.config["steps_per_print"]
        if every and self.global_steps % every == 0:
            now = time.perf_counter()
            step_s = (now - self._last_print) / every
            self._last_print = now
            print(
                f"steps: {self.global_steps} loss: {loss.item():0.4f} iter time (s): {step_s:0.3f} "
                f"samples/sec: {self.batch.train / step_s:0.3f}",
                flush=True,
            )

    # -- evaluation ------------------------------------------------------------------------------------------------

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Micro-batches forward, without gradients; the training iterator stays where it is.

        Args:
            data_iter: as for `train_batch`.
            return_logits: returns `(result, outputs)`, outputs being those of all micro-batches, one after the other.
            compute_loss: False takes the outputs themselves for the result.
            reduce_output: "avg" is the mean over micro-batches and replicas; None the list of each micro-batch's.
            bcast_loss: False gives the result to the last stage alone, and None to others.
            num_micro_batches: how many; None as many as a step has.

        Ranks: all.

        Raises:
            StopIteration: on all ranks; and those of `_pull`. ValueError for another `reduce_output`.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"reduce_output is 'avg' or None, not {reduce_output!r}")
        iterator = data_iter
        if iterator is None:
            iterator = self._data
        batches = self._pull(iterator, num_micro_batches or self.batch.accumulate)
        training = self.training
        self.eval()
        results = []
        outputs = []
        try:
            with torch.no_grad():
                for inputs, labels in batches:
                    with self.module.finishing(self._finisher(labels, return_logits, compute_loss)):
                        result, output = self.prepared_model(inputs)
                    results.append(result)
                    outputs.append(output)
        finally:
            # Also after an error that the script catches: its next training step must not run in evaluation mode.
            self.train(training)
        reduced: Any = results
        if reduce_output == "avg":
            reduced = self.accelerator.run.data_ranks.reduce(torch.stack(results).mean(dim=0), "mean")
        if not (bcast_loss or self.is_last_stage()):
            reduced = None
        if return_logits:
            return reduced, torch.cat(outputs)
        return reduced

    def _finisher(self, labels: object, logits: bool, compute_loss: bool) -> Callable[[Any], Any]:
        """Makes the function that the last stage applies to its output: no more than is asked for travels to the others."""

        def finish(output: Any) -> Any:
            output = to_float32(output)
            result = output
            if compute_loss:
                with torch.autocast(self.accelerator.device.type, enabled=False):
                    result = self._loss(output, labels)
            if not logits:
                output = torch.zeros(0, device=self.accelerator.device)  # empty, and not None: stages send tensors
            return result, output

        return finish

    forward = _refused("forward")
    backward = _refused("backward")
    step = _refused("step")


def _pair(batch: object) -> tuple[Any, Any]:
    """`(inputs, labels)`; inputs that are a list become a tuple, which is what layers pass on."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise DataError(
            "pipe-batch",
            f"a micro-batch of a pipeline is `(inputs, labels)`, not {type(batch).__name__}.",
            why="the first stage takes the one, the last stage the other; inputs may be a tuple of tensors",
            fix="let the data set or the collate function give two values",
        )
    inputs, labels = batch
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    return inputs, labels


def _without_values(leaf: object) -> Any:
    """Returns a tensor of the same shape and dtype on meta; anything else as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to("meta")
    return leaf


def _repeated(loader: Any) -> Iterator[Any]:
    """Yields the batches of a loader over and over; an empty one ends."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            return


def _example(model: PipelineModule, batch: Batch, training_data: Any, collate_fn: Any) -> Any:
    """Returns inputs with which the layers can be measured."""
    if model.example_inputs is not None:
        return model.example_inputs
    if training_data is None:
        raise DataError(
            "pipe-profile",
            "partition_method='profile' measures the layers, and there is nothing to measure them with.",
            why="neither training_data nor example_inputs was given",
            fix="write PipelineModule(..., partition_method='profile', example_inputs=torch.zeros(8, 784))",
        )
    loader = loader_of(training_data, batch.micro, collate_fn, drop_last=False, shuffle=False)
    inputs, _ = _pair(next(iter(loader)))
    return inputs
