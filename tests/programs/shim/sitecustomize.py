"""Makes a program of other people run on this machine's CPU, and records its losses. Python imports this file at each start.

    CUDA        tensors and modules that are moved to `cuda` stay on the CPU
    seeds       every process begins with the same one; a program may set its own
    data        data sets that would be downloaded are drawn at random, small
    trackers    modules that `$PROGRAMS_IDLE` names are there, and do nothing
    metrics     a metric that would be downloaded is one of ours, which records what it is given
    record      the value of every loss that needs a gradient goes to `$PROGRAMS_RECORD/RANK.txt`, in the order of the calls

The same file serves both sides of a comparison. Of the libraries that are compared it changes four things: the real DeepSpeed
does not compile its kernel for shared memory, which changes no number; it steps with torch's Adam in place of one that it
would compile for minutes; it takes float16 on a CPU, as ours does; and the real accelerate takes FSDP and DeepSpeed on a CPU.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

FOLDER = os.environ.get("PROGRAMS_RECORD", "")
LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)

FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros"),
)


def record(value: Any) -> None:
    """Appends a loss to this rank's file."""
    write(float(value.detach()))


def write(value: float) -> None:
    """Appends a number to this rank's file."""
    rank = os.environ.get("RANK", "0")
    with open(Path(FOLDER) / f"{rank}.txt", "a", encoding="utf-8") as file:
        file.write(f"{value!r}\n")


def recorded(loss: Any) -> Any:
    """Returns a loss function that also records its scalar results."""

    @wraps(loss)
    def function(*args: Any, **kwargs: Any) -> Any:
        result = loss(*args, **kwargs)
        if result.requires_grad and result.dim() == 0 and not result.is_meta and type(result).__name__ == "Tensor":
            record(result)
        return result

    return function


def recorded_backward(backward: Any) -> Any:
    """Returns a `backward` that records its tensor, for programs that compute a loss without a function for it."""

    @wraps(backward)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        record(self.full_tensor() if hasattr(self, "full_tensor") else self)
        return backward(self, *args, **kwargs)

    return method


def recorded_stack(stack: Any) -> Any:
    """Returns a `stack` that records its sum where `$PROGRAMS_STACK` asks for it, for programs that stack what they found."""

    @wraps(stack)
    def function(*args: Any, **kwargs: Any) -> Any:
        result = stack(*args, **kwargs)
        if os.environ.get("PROGRAMS_STACK"):
            write(float(result.double().sum()))
        return result

    return function


def over_gloo(init: Any) -> Any:
    """Returns an `init_process_group` that takes gloo in place of NCCL, and names no device."""

    @wraps(init)
    def function(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> Any:
        return init("gloo" if "nccl" in str(backend) else backend, *args, **kwargs)

    return function


def without_devices(barrier: Any) -> Any:
    """Returns a `barrier` that takes the number of a device, which gloo does not."""

    @wraps(barrier)
    def function(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    return function


def without_cuda(value: Any) -> Any:
    """Returns the CPU in place of a CUDA device."""
    import torch

    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


def on_cpu(function: Any, numbers: bool = False) -> Any:
    """Returns a function that takes each of its arguments through `without_cuda`; `numbers`: a number is a device too."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and isinstance(kwargs["device"], int):
            kwargs["device"] = "cpu"
        kept = [without_cuda(value) for value in args]
        if numbers:
            kept = ["cpu" if type(value) is int else value for value in kept]
        return function(*kept, **{name: without_cuda(value) for name, value in kwargs.items()})

    return wrapper


def shim_torch(torch: Any) -> None:
    """Replaces what needs CUDA, and the losses."""
    torch.manual_seed(0)
    functional = torch.nn.functional
    by_backward = bool(os.environ.get("PROGRAMS_BACKWARD"))
    for name in () if by_backward else LOSSES:
        setattr(functional, name, recorded(getattr(functional, name)))
    torch.distributed.init_process_group = over_gloo(torch.distributed.init_process_group)
    torch.distributed.barrier = without_devices(torch.distributed.barrier)
    if by_backward:
        torch.Tensor.backward = recorded_backward(torch.Tensor.backward)
    torch.stack = recorded_stack(torch.stack)
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    if os.environ.get("PROGRAMS_ACCELERATOR"):  # for programs that ask which one there is, and take no answer "none"
        torch.accelerator.is_available = lambda: True
        torch.accelerator.device_count = lambda: 8
        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
        torch.accelerator.set_device_index = lambda *_: None
        torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_: None
        torch.cpu.memory_allocated = torch.cpu.max_memory_allocated = lambda *_: 0
    if os.environ.get("PROGRAMS_CUDA"):  # for programs that divide by the number of devices
        torch.cuda.device_count = lambda: int(os.environ["PROGRAMS_CUDA"])
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = on_cpu(owner.to, numbers=True)
        owner.cuda = lambda self, *_, **__: self
    # A context `torch.device("meta")` knows the functions that it changes by these objects, and collects them once. It must see
    # torch's own: else transformers takes a model on meta for one with values, and leaves its buffers without any.
    import_module("torch.utils._device")._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "init",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
    ):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in (
        "current_device",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(torch.cuda, name, lambda *_, **__: 0)


def shim_distributed(distributed: Any) -> None:
    """Makes DDP take modules on the CPU from programs that name a device."""
    plain = distributed.DistributedDataParallel.__init__

    @wraps(plain)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        plain(self, module, None, None, *args, **kwargs)

    distributed.DistributedDataParallel.__init__ = init


def shim_torchvision(datasets: Any) -> None:
    """Draws data sets in place of downloads; as many classes and the same shapes, but fewer samples."""
    import torch

    def small(size: tuple[int, ...], classes: int) -> Any:
        class Drawn(torch.utils.data.Dataset):  # type: ignore[type-arg]
            def __init__(self, *given: Any, transform: Any = None, target_transform: Any = None, **_: Any) -> None:
                positional = [value for value in given if callable(value)]
                self.transform = positional[0] if positional else transform
                self.classes = [f"class{number}" for number in range(classes)]

            def __len__(self) -> int:
                return int(os.environ.get("PROGRAMS_SAMPLES", "64"))

            def __getitem__(self, index: int) -> Any:
                generator = torch.Generator().manual_seed(index)
                pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
                image = functional.to_pil_image(pixels)
                if self.transform is not None:
                    image = self.transform(image)
                return image, index % classes

        return Drawn

    from torchvision.transforms import functional

    datasets.CIFAR10 = small((3, 32, 32), 10)
    datasets.CIFAR100 = small((3, 32, 32), 100)
    datasets.MNIST = datasets.FashionMNIST = small((1, 28, 28), 10)
    datasets.ImageFolder = small((3, 64, 64), 1000)


def shim_deepspeed(torch_backend: Any) -> None:
    """Leaves the kernel out that DeepSpeed would compile at each start."""
    torch_backend.build_shm_op = lambda: None


def shim_accelerator(cpu: Any) -> None:
    """Allows float16."""
    cpu.CPU_Accelerator.is_fp16_supported = lambda self: True


def shim_fused_adam(fused_adam: Any) -> None:
    """Makes `FusedAdam` torch's AdamW, with DeepSpeed's defaults."""
    import torch

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params: Any, lr: float = 1e-3, **keywords: Any) -> None:
            for name in ("bias_correction", "adam_w_mode", "set_grad_none"):
                keywords.pop(name, None)
            super().__init__(params, lr, **{"weight_decay": 0.0, **keywords})

    fused_adam.FusedAdam = FusedAdam


def shim_state(state: Any) -> None:
    """Makes the real accelerate take its engines on a CPU, whose processes talk by gloo."""
    if os.environ.get("PROGRAMS_ENGINE"):
        state.PartialState._prepare_backend = lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU)


def shim_config(config: Any) -> None:
    """Makes Adam torch's."""
    plain = config.get_optimizer_params

    def get_optimizer_params(keys: dict[str, Any]) -> Any:
        params = plain(keys)
        if "adam" in str(config.get_optimizer_name(keys)).lower():
            params = {**(params or {}), "torch_adam": True}
        return params

    config.get_optimizer_params = get_optimizer_params


def shim_transformers(transformers: Any) -> None:
    """Gives transformers a name that it no longer has, to programs that import it beside others; and a tokenizer without
    files of a vocabulary saves none."""
    if os.environ.get("PROGRAMS_OLDER"):
        import torch

        transformers.AdamW = torch.optim.AdamW
        transformers.PreTrainedTokenizerFast.save_vocabulary = lambda *_, **__: ()


class Metric:
    """Stands for a metric that would be downloaded: records what it is given, and finds the share of rows that are right."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, Any]] = []

    def add_batch(self, *, references: Any, predictions: Any = (), prediction_scores: Any = ()) -> None:
        """Adds a batch; some metrics call predictions scores."""
        predicted, expected = listed(predictions) or listed(prediction_scores), listed(references)
        self._rows += zip(predicted, expected, strict=True)

    add = add_batch

    def compute(self, *, predictions: Any = (), references: Any = (), **_: Any) -> dict[str, float]:
        """Returns the share under each name that a program reads."""
        self.add_batch(predictions=predictions, references=references)
        right = sum(predicted == expected for predicted, expected in self._rows) / max(len(self._rows), 1)
        write(float(len(self._rows)))
        write(float(zlib.crc32(repr(self._rows).encode())))
        self._rows = []
        names = ("accuracy", "score", "overall_precision", "overall_recall", "overall_f1", "overall_accuracy")
        return dict.fromkeys((*names, "mean_iou", "mean_accuracy", "rouge1", "f1", "exact_match"), right)


def listed(values: Any) -> list[Any]:
    """Returns a list of rows of a tensor, an array or a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def shim_datasets(datasets: Any) -> None:
    """Takes files that a program names on the hub from the folder of this name."""
    plain = datasets.load_dataset

    @wraps(plain)
    def load_dataset(*args: Any, data_files: Any = None, **kwargs: Any) -> Any:
        for split, file in (data_files if isinstance(data_files, dict) else {}).items():
            if isinstance(file, str):
                data_files[split] = file.removeprefix("hf://")
        return plain(*args, data_files=data_files, **kwargs)

    datasets.load_dataset = load_dataset


def shim_psutil(psutil: Any) -> None:
    """Slows down who asks for the memory of a process without a pause, in a thread beside the training."""
    plain = psutil.Process.memory_info

    def memory_info(self: Any) -> Any:
        time.sleep(0.02)
        return plain(self)

    psutil.Process.memory_info = memory_info


def shim_evaluate(evaluate: Any) -> None:
    """Gives a metric of ours in place of one that is downloaded."""
    evaluate.load = lambda *_, **__: Metric()


def shim_albumentations(compositions: Any) -> None:
    """Seeds the changes of pictures, which have a generator of their own."""
    plain = compositions.Compose.__init__

    @wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{"seed": 0, **kwargs})

    compositions.Compose.__init__ = init


def shim_nltk(nltk: Any) -> None:
    """Cuts sentences without the tables that would be downloaded."""
    nltk.data.find = lambda *_, **__: None
    nltk.sent_tokenize = lambda text, *_, **__: text.split(". ")


def shim_original_unet(unet: Any) -> None:
    """Makes the U-Net of sd-scripts as small as that of `inputs.kohya`; its sizes are constants."""
    unet.BLOCK_OUT_CHANNELS = (32, 32, 64, 64)
    unet.TIMESTEP_INPUT_DIM = 32
    unet.TIME_EMBED_DIM = 128


def shim_nanochat(common: Any) -> None:
    """Starts a process group, which the program does only where there is CUDA."""
    plain = common.compute_init

    @wraps(plain)
    def compute_init(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            import_module("torch.distributed").init_process_group("gloo")
        return found

    common.compute_init = compute_init


def shim_memory(memory: Any) -> None:
    """Leaves out what torchtune's recipes ask of a GPU's memory on every device."""
    memory.cleanup_before_training = lambda: None
    memory.get_memory_stats = lambda *_, **__: {}
    memory.log_memory_stats = lambda *_, **__: None


def shim_hub(hub: Any) -> None:
    """Takes a file of a data set, and a whole model, from the folder of its name."""
    plain = hub.hf_hub_download

    @wraps(plain)
    def hf_hub_download(repo_id: str, filename: str, *args: Any, **kwargs: Any) -> Any:
        path = Path(repo_id) / filename
        return str(path) if path.is_file() else plain(repo_id, filename, *args, **kwargs)

    hub.hf_hub_download = hf_hub_download
    whole = hub.snapshot_download

    @wraps(whole)
    def snapshot_download(repo_id: str, *args: Any, **kwargs: Any) -> Any:
        return repo_id if Path(repo_id).is_dir() else whole(repo_id, *args, **kwargs)

    hub.snapshot_download = snapshot_download


def shim_generation(generation: Any) -> None:
    """Records the sum of the tokens that a model generates, for programs that have no loss."""
    if not os.environ.get("PROGRAMS_GENERATED"):
        return
    plain = generation.GenerationMixin.generate

    @wraps(plain)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = plain(self, *args, **kwargs)
        write(float(tokens.sum()))
        return tokens

    generation.GenerationMixin.generate = generate


def shim_timm(timm: Any) -> None:
    """Draws the weights of a model in place of a download."""
    plain = timm.create_model

    @wraps(plain)
    def create_model(*args: Any, pretrained: bool = False, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    timm.create_model = create_model


SHIMS = {
    "albumentations.core.composition": shim_albumentations,
    "accelerate.state": shim_state,
    "datasets": shim_datasets,
    "evaluate": shim_evaluate,
    "huggingface_hub": shim_hub,
    "library.original_unet": shim_original_unet,
    "nanochat.common": shim_nanochat,
    "nltk": shim_nltk,
    "deepspeed.runtime.config": shim_config,
    "transformers.generation.utils": shim_generation,
    "timm": shim_timm,
    "psutil": shim_psutil,
    "torch": shim_torch,
    "torchtune.training.memory": shim_memory,
    "transformers": shim_transformers,
    "torch.nn.parallel.distributed": shim_distributed,
    "torchvision.datasets": shim_torchvision,
    "deepspeed.comm.torch": shim_deepspeed,
    "deepspeed.ops.adam.fused_adam": shim_fused_adam,
    "deepspeed.accelerator.cpu_accelerator": shim_accelerator,
}


class IdleLoader(Loader):
    """Makes a module each of whose names can be called and does nothing: a tracker that is not installed."""

    def exec_module(self, module: Any) -> None:
        """Gives it all names."""

        def look_up(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        module.__getattr__ = look_up


class ShimLoader(Loader):
    """Loads a module as ever, and changes it once."""

    def __init__(self, plain: Any, name: str) -> None:
        self._plain = plain
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        """Creates it."""
        return self._plain.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Runs it."""
        self._plain.exec_module(module)
        # transformers puts another object into the place of its module.
        SHIMS[self._name](sys.modules.get(self._name, module))


class ShimFinder(MetaPathFinder):
    """Finds the modules that are changed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of a module that is changed, with a loader of ours."""
        if name in os.environ.get("PROGRAMS_IDLE", "").split(","):
            return ModuleSpec(name, IdleLoader(), is_package=True)
        if name not in SHIMS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = ShimLoader(spec.loader, name)
                return spec
        return None


if FOLDER:
    # torchvision's compiled operators need CUDA's libraries, and without them their shapes cannot be registered. No program of
    # the table calls one.
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
    sys.meta_path.insert(0, ShimFinder())
