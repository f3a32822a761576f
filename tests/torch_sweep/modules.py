"""Every module of `torch.nn`, each in a small model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_sweep.runs import FEATURES, WORDS, Case


class Around(nn.Module):
    """A linear layer, a module, and fixed weights that make one value a row of what it returns.

    Args:
        module: gets h [rows, *shape], or the words if `shape` is None.
        shape: of one row of what it gets.
        call: calls the module in another way, with the module, h and words.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...] | None, call: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, torch.Size(shape or (3,)).numel())
        self.module = module
        self.shape, self.call = shape, call

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = self.first(x)
        if self.call is not None:
            output = self.call(self.module, h.reshape(len(x), *(self.shape or (3,))), words)
        elif self.shape is None:
            output = self.module(words)
        else:
            output = self.module(h.reshape(len(x), *self.shape))
        if isinstance(output, tuple):
            output = output[0]
        rows = output.reshape(len(x), -1)
        weights = torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype)
        value = (rows * weights).mean(1)
        return value + h.mean(1)


def case(
    name: str,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...] | None,
    call: Any = None,
    plain: Callable[[], nn.Module] | None = None,
    divided: str = "",
) -> Case:
    def model() -> nn.Module:
        return Around(build(), shape, call)

    def plain_model() -> nn.Module:
        return Around((plain or build)(), shape, call)

    styles = {"first": "rowwise_split", **({"module": divided} if divided else {})}
    sgd = partial(torch.optim.SGD, lr=0.05)
    return Case(name, model, sgd, plain_model=plain_model, sequences=shape == (3, 4), divided=styles)


class RightBag(nn.EmbeddingBag):
    """A bag that divides gradients by frequencies of their own rows; torch's kernel for the CPU (2.13) takes other rows'."""

    def forward(self, words: Tensor, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        rows = nn.functional.embedding(words, self.weight, scale_grad_by_freq=True)
        weights = torch.ones(words.shape, dtype=rows.dtype) if per_sample_weights is None else per_sample_weights
        if self.padding_idx is not None:
            weights = weights.masked_fill(words == self.padding_idx, 0.0)
        summed = (rows * weights.unsqueeze(-1)).sum(1)
        if self.mode == "mean":
            return summed / weights.sum(1, keepdim=True).clamp(min=1)
        return summed


def per_bag(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(words, per_sample_weights=h)


def by_offsets(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(words.reshape(-1), torch.arange(0, words.numel(), 3))


BATCH_LAYERS = [
    case("Embedding(max_norm)", lambda: nn.Embedding(WORDS, 4, max_norm=0.5), None),
    case(
        "Embedding(max_norm, norm_type=1, padding_idx)",
        lambda: nn.Embedding(WORDS, 4, padding_idx=2, max_norm=0.5, norm_type=1),
        None,
    ),
    case("Embedding(scale_grad_by_freq)", lambda: nn.Embedding(WORDS, 4, scale_grad_by_freq=True), None),
    case("Embedding(both)", lambda: nn.Embedding(WORDS, 4, max_norm=1.0, scale_grad_by_freq=True, padding_idx=1), None),
    case("EmbeddingBag(max_norm)", lambda: nn.EmbeddingBag(WORDS, 4, max_norm=0.5), None),
    case("EmbeddingBag(max_norm, mode=max)", lambda: nn.EmbeddingBag(WORDS, 4, max_norm=0.5, mode="max"), None),
    case(
        "EmbeddingBag(scale_grad_by_freq, padding_idx)",
        lambda: nn.EmbeddingBag(WORDS, 4, scale_grad_by_freq=True, padding_idx=3),
        None,
        None,
        lambda: RightBag(WORDS, 4, padding_idx=3),
    ),
    case(
        "EmbeddingBag(scale_grad_by_freq, per_sample_weights)",
        lambda: nn.EmbeddingBag(WORDS, 4, scale_grad_by_freq=True, mode="sum"),
        None,
        per_bag,
        lambda: RightBag(WORDS, 4, mode="sum"),
    ),
    case("EmbeddingBag(max_norm, offsets)", lambda: nn.EmbeddingBag(WORDS, 4, max_norm=0.5), None, by_offsets),
    case("InstanceNorm1d(track_running_stats)", lambda: nn.InstanceNorm1d(2, track_running_stats=True), (2, 4)),
    case(
        "InstanceNorm2d(track_running_stats, affine)",
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        (2, 2, 3),
    ),
    case(
        "InstanceNorm3d(track_running_stats, momentum)",
        lambda: nn.InstanceNorm3d(2, momentum=0.3, track_running_stats=True),
        (2, 2, 2, 2),
    ),
]


def attend(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(h, h, h)[0]


def twice(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(h, h * 0.5)


def decode(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(h, h * 0.5)


def unpool(dims: int) -> Callable[..., Tensor]:
    def call(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
        pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        return module(*pool(h))

    return call


def adaptive(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return module(h, words[:, 0]).output


def ctc(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    log_probs = h.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(h),), h.shape[1])
    return module(log_probs, words[:, :2].clamp(1, 3), lengths, torch.full((len(h),), 2))


def plus(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    return h + sum(parameter.sum() for parameter in module.parameters())


def through(module: nn.Module, h: Tensor, words: Tensor) -> Tensor:
    for inner in module.values() if isinstance(module, nn.ModuleDict) else module:
        h = inner(h)
    return h


def one(
    kind: str,
    *args: Any,
    shape: tuple[int, ...] | None = (8,),
    call: Any = None,
    text: str = "",
    divided: str = "",
    **kwargs: Any,
) -> Case:
    """The case of one class, built with these arguments; `divided` is what `tp` does with it."""
    shown = [str(value) for value in args if not isinstance(value, (nn.Module, list, dict))]
    shown += [f"{key}={value}" for key, value in kwargs.items()]
    return case(
        f"{kind}({text or ', '.join(shown)})", lambda: getattr(nn, kind)(*args, **kwargs), shape, call, None, divided
    )


ACTIVATIONS = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "Identity",
    "LeakyReLU",
]
ACTIVATIONS += [
    "LogSigmoid",
    "LogSoftmax",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SELU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmin",
]
ACTIVATIONS += ["Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink"]
IMAGES = {1: (2, 6), 2: (2, 6, 6), 3: (2, 4, 4, 4)}


def by_dims() -> list[Case]:
    cases = []
    for dims, shape in IMAGES.items():
        d = f"{dims}d"
        cases += [
            one(f"Conv{d}", 2, 3, 3, shape=shape),
            one(f"ConvTranspose{d}", 2, 3, 2, shape=shape),
            one(f"MaxPool{d}", 2, shape=shape),
            one(f"MaxUnpool{d}", 2, shape=shape, call=unpool(dims)),
            one(f"AvgPool{d}", 2, shape=shape),
            one(f"LPPool{d}", 2, 2, shape=shape),
            one(f"AdaptiveMaxPool{d}", 2, shape=shape),
            one(f"AdaptiveAvgPool{d}", 2, shape=shape),
            one(f"BatchNorm{d}", 2, shape=shape),
            one(f"BatchNorm{d}", 2, affine=False, track_running_stats=False, shape=shape),
            one(f"BatchNorm{d}", 2, momentum=None, shape=shape),
            one(f"BatchNorm{d}", 2, eps=0.1, momentum=0.5, bias=False, shape=shape)
            if "bias" in inspect.signature(nn.BatchNorm1d).parameters
            else one(f"BatchNorm{d}", 2, eps=0.1, momentum=0.5, shape=shape),
            one(f"InstanceNorm{d}", 2, affine=True, shape=shape),
            one(f"ReflectionPad{d}", 1, shape=shape),
            one(f"ReplicationPad{d}", 1, shape=shape),
            one(f"ZeroPad{d}", 1, shape=shape),
            one(f"ConstantPad{d}", 1, 0.5, shape=shape),
            one(f"CircularPad{d}", 1, shape=shape),
            one(f"LazyConv{d}", 3, 3, shape=shape),
            one(f"LazyConvTranspose{d}", 3, 2, shape=shape),
            one(f"LazyBatchNorm{d}", shape=shape),
            one(f"LazyInstanceNorm{d}", affine=True, shape=shape),
        ]
        if dims > 1:
            cases.append(one(f"FractionalMaxPool{d}", 2, output_size=2, shape=shape))
            cases.append(one(f"Dropout{d}", 0.5, shape=shape))
    return cases


MODULES: list[Case] = [
    *BATCH_LAYERS,
    *by_dims(),
    *(one(kind, **({"dim": 1} if "oftm" in kind else {})) for kind in ACTIVATIONS),
    one("Softmax2d", shape=(2, 2, 2)),
    one("Threshold", 0.1, 0.0),
    one("RReLU"),
    one("Dropout", 0.5),
    one("Dropout", 0.0),
    one("Dropout1d", 0.5, shape=(2, 6)),
    one("AlphaDropout", 0.5),
    one("FeatureAlphaDropout", 0.5, shape=(2, 6)),
    one("Linear", 12, 3, shape=(12,), divided="rowwise_split"),
    one("Linear", 8, 12, divided="colwise_gather"),
    one("Bilinear", 4, 4, 3, shape=(4,), call=twice),
    one("LazyLinear", 3),
    one("Flatten", shape=(2, 4)),
    one("Unflatten", 1, (2, 4)),
    one("Fold", 4, 2, shape=(8, 9)),
    one("Unfold", 2, shape=(2, 4, 4)),
    one("PixelShuffle", 2, shape=(4, 2, 2)),
    one("PixelUnshuffle", 2, shape=(1, 4, 4)),
    one("ChannelShuffle", 2, shape=(4, 2, 2)),
    one("Upsample", scale_factor=2, shape=(1, 2, 2)),
    one("UpsamplingNearest2d", scale_factor=2, shape=(1, 2, 2)),
    one("UpsamplingBilinear2d", scale_factor=2, shape=(1, 2, 2)),
    one("GroupNorm", 2, 4, shape=(4, 3)),
    one("LayerNorm", 8, divided="replicated"),
    one("RMSNorm", 8),
    one("LocalResponseNorm", 2, shape=(4, 3)),
    one("CrossMapLRN2d", 2, shape=(4, 3, 3)),
    one("SyncBatchNorm", 2, shape=(2, 6)),
    one("RNN", 4, 3, batch_first=True, shape=(3, 4)),
    one("LSTM", 4, 3, batch_first=True, bidirectional=True, shape=(3, 4)),
    one("GRU", 4, 3, num_layers=2, batch_first=True, shape=(3, 4)),
    one("LSTM", 4, 3, num_layers=2, dropout=0.5, batch_first=True, shape=(3, 4)),
    one("RNNCell", 8, 3),
    one("LSTMCell", 8, 3),
    one("GRUCell", 8, 3),
    one("MultiheadAttention", 4, 2, batch_first=True, shape=(3, 4), call=attend),
    one("TransformerEncoderLayer", 4, 2, 8, dropout=0.0, batch_first=True, shape=(3, 4)),
    one("TransformerDecoderLayer", 4, 2, 8, dropout=0.0, batch_first=True, shape=(3, 4), call=decode),
    case(
        "TransformerEncoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
        (3, 4),
    ),
    case(
        "TransformerDecoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
        (3, 4),
        decode,
    ),
    one("Transformer", 4, 2, 1, 1, 8, dropout=0.0, batch_first=True, shape=(3, 4), call=decode),
    one("Embedding", WORDS, 4, shape=None, divided="vocabulary"),
    one("Embedding", WORDS, 4, padding_idx=1, shape=None),
    one("Embedding", WORDS, 4, sparse=True, shape=None),
    one("EmbeddingBag", WORDS, 4, shape=None),
    one("EmbeddingBag", WORDS, 4, mode="max", shape=None),
    one("EmbeddingBag", WORDS, 4, sparse=True, shape=None),
    one("CosineSimilarity", shape=(8,), call=lambda m, h, w: m(h, h.square())),
    one("PairwiseDistance", shape=(8,), call=lambda m, h, w: m(h, h.tanh())),
    case("Sequential", lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (8,)),
    case("ModuleList", lambda: nn.ModuleList([nn.Linear(8, 8), nn.Tanh()]), (8,), through),
    case("ModuleDict", lambda: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Tanh()}), (8,), through),
    case(
        "ParameterList",
        lambda: nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2))]),
        (8,),
        plus,
    ),
    case("ParameterDict", lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(8))}), (8,), plus),
    case("DataParallel", lambda: nn.DataParallel(nn.Linear(8, 8)), (8,)),
    case("parametrizations.spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), (8,)),
    case("parametrizations.weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), (8,)),
    case("parametrizations.orthogonal", lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 4)), (8,)),
    case("utils.spectral_norm", lambda: nn.utils.spectral_norm(nn.Linear(8, 4)), (8,)),
    case("utils.weight_norm", lambda: nn.utils.weight_norm(nn.Linear(8, 4)), (8,)),
    # Losses, one value for each row.
    *(
        one(kind, reduction="none", call=lambda m, h, w: m(h, h.detach().flip(1)))
        for kind in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss")
    ),
    one("BCELoss", reduction="none", call=lambda m, h, w: m(h.sigmoid(), h.detach().flip(1).sigmoid())),
    one("BCEWithLogitsLoss", reduction="none", call=lambda m, h, w: m(h, h.detach().flip(1).sigmoid())),
    one("KLDivLoss", reduction="none", call=lambda m, h, w: m(h.log_softmax(1), h.detach().flip(1).softmax(1))),
    one("PoissonNLLLoss", reduction="none", call=lambda m, h, w: m(h, h.detach().flip(1).abs())),
    one("GaussianNLLLoss", reduction="none", call=lambda m, h, w: m(h, h.detach().flip(1), h.square() + 1)),
    one("SoftMarginLoss", reduction="none", call=lambda m, h, w: m(h, h.detach().flip(1).sign())),
    one("HingeEmbeddingLoss", reduction="none", call=lambda m, h, w: m(h, h.detach().flip(1).sign())),
    one("MultiLabelSoftMarginLoss", reduction="none", call=lambda m, h, w: m(h, (h.detach().flip(1) > 0).double())),
    one(
        "MultiLabelMarginLoss",
        reduction="none",
        shape=(WORDS,),
        call=lambda m, h, w: m(h, nn.functional.pad(w, (0, WORDS - 3), value=-1)),
    ),
    one("MultiMarginLoss", reduction="none", shape=(WORDS,), call=lambda m, h, w: m(h, w[:, 0])),
    one("CrossEntropyLoss", reduction="none", label_smoothing=0.1, shape=(WORDS,), call=lambda m, h, w: m(h, w[:, 0])),
    one("NLLLoss", reduction="none", shape=(WORDS,), call=lambda m, h, w: m(h.log_softmax(1), w[:, 0])),
    one("NLLLoss2d", reduction="none", shape=(WORDS, 1, 1), call=lambda m, h, w: m(h.log_softmax(1), w[:, :1, None])),
    one("MarginRankingLoss", reduction="none", call=lambda m, h, w: m(h, h.flip(1), h.detach().sign())),
    one("CosineEmbeddingLoss", reduction="none", call=lambda m, h, w: m(h, h.flip(1), (w[:, 0] % 2) * 2.0 - 1)),
    one("TripletMarginLoss", reduction="none", call=lambda m, h, w: m(h, h.flip(1), h.square())),
    one("TripletMarginWithDistanceLoss", reduction="none", call=lambda m, h, w: m(h, h.flip(1), h.square())),
    one("CTCLoss", reduction="none", shape=(5, 4), call=ctc),
    one("AdaptiveLogSoftmaxWithLoss", 8, WORDS, [4], shape=(8,), call=adaptive, text=f"8, {WORDS}, [4]"),
]
# Since torch 2.13.
if hasattr(nn, "LinearCrossEntropyLoss"):
    MODULES.append(one("LinearCrossEntropyLoss", 8, WORDS, reduction="none", call=lambda m, h, w: m(h, w[:, 0])))
# Base classes.
LEFT_OUT = {"Module", "Container", "RNNBase", "RNNCellBase"}
