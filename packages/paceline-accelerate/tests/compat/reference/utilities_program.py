"""The part of `state_program` that asks `accelerate.utils` and `accelerate.logging`."""

import collections
import logging
import os
import pickle
import random
import warnings

import numpy
import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import environment, imports, memory, operations, other, set_seed, tqdm
from accelerate.utils import random as streams
from accelerate.utils.versions import compare_versions, is_torch_version
from state_program import Movable, Pair, answers
from torch import nn


def tensors():
    """Operations on nested tensors."""
    o = operations
    rank, size = PartialState().process_index, PartialState().num_processes
    one = torch.tensor([rank])
    uneven = torch.arange(rank + 1) + 1
    nested = {"a": [one, (one.float(),)], "b": Pair(one, one)}
    batch = {"a": torch.ones(3, 2), "b": [torch.zeros(3)]}
    return answers(
        gather=lambda: [o.gather(one), o.gather(torch.tensor(rank)), o.gather(torch.tensor([True, rank == 0]))],
        gather_nested=lambda: o.gather(nested),
        gather_mappings=lambda: [o.gather(collections.OrderedDict(a=one)), o.gather(collections.UserDict(a=one))],
        gather_empty=lambda: [o.gather([]), o.gather(torch.ones(0, 2)).shape, o.gather(torch.ones(2, 3)).shape],
        gather_half=lambda: [o.gather(torch.ones(1).half()), o.gather(torch.ones(1).bfloat16())],
        gather_text=lambda: o.gather({"a": "x"}),
        gather_none=lambda: o.gather([None]),
        objects=lambda: [
            o.gather_object([rank]),
            o.gather_object([{"a": one}]),
            o.gather_object("ab"),
            o.gather_object((1,)),
        ],
        object_number=lambda: o.gather_object(3),
        broadcast=lambda: o.broadcast({"a": torch.tensor([rank])}, from_process=size - 1),
        broadcast_into=lambda: [(into := torch.tensor([rank])), o.broadcast(into, size - 1), into][1:],
        broadcast_text=lambda: o.broadcast("a"),
        broadcast_objects=lambda: o.broadcast_object_list([rank, "x"], from_process=size - 1),
        reduce=lambda: [o.reduce(one.float(), word) for word in ("sum", "mean", "max", "none")],
        reduce_default=lambda: [o.reduce(one.float()), o.reduce(torch.tensor(1.0 + rank), "sum", scale=0.5)],
        reduce_integers=lambda: [o.reduce(one, "sum"), o.reduce(one, "max"), o.reduce({"a": [one]}, "sum")],
        reduce_text=lambda: o.reduce("x"),
        pad=lambda: [o.pad_across_processes(uneven), o.pad_across_processes(uneven, pad_index=-7, pad_first=True)],
        pad_dims=lambda: [o.pad_across_processes(torch.ones(2, rank + 1), dim=dim, pad_index=9) for dim in (1, -1)],
        pad_other=lambda: [o.pad_across_processes(torch.ones(2), dim=1), o.pad_across_processes(torch.tensor(3))],
        pad_nested=lambda: o.pad_across_processes({"a": torch.ones(rank + 1), "b": (torch.ones(1),)}),
        pad_text=lambda: o.pad_across_processes(["x", one]),
        pad_input=lambda: [o.pad_input_tensors(torch.arange(5), 5, 2), o.pad_input_tensors(torch.arange(4), 4, 2)],
        pad_input_nested=lambda: o.pad_input_tensors({"a": torch.arange(3), "b": torch.ones(3, 2)}, 3, 4),
        pad_input_text=lambda: o.pad_input_tensors("x", 5, 2),
        structure=lambda: o.get_data_structure({"a": torch.ones(1, 2), "b": [torch.tensor(True)], "c": "x"}),
        information=lambda: [
            o.is_tensor_information(o.TensorInformation((1,), torch.int8)),
            o.is_tensor_information(3),
        ],
        initialized=lambda: [tensor.shape for tensor in o.initialize_tensors(o.get_data_structure(nested["b"]))],
        shape=lambda: o.get_shape({"a": torch.ones(1, 2), "b": [torch.tensor(1)], "c": "x"}),
        size=lambda: [o.find_batch_size(batch), o.find_batch_size(collections.UserDict(batch))],
        size_scalar=lambda: o.find_batch_size(torch.tensor(1)),
        size_text=lambda: o.find_batch_size(["x", torch.ones(4)]),
        size_empty=lambda: o.find_batch_size([]),
        size_none=lambda: o.find_batch_size(None),
        size_ignorant=lambda: [o.ignorant_find_batch_size(each) for each in ("x", [], ["x", one], torch.ones(4))],
        device=lambda: [o.find_device({"a": "x", "b": [one]}), o.find_device("x"), o.find_device([])],
        joined=lambda: [o.concatenate([batch, batch]), o.concatenate([Pair(one, one)] * 2)],
        joined_dim=lambda: o.concatenate([torch.ones(1, 1), torch.ones(1, 2)], dim=1),
        joined_text=lambda: o.concatenate([{"a": "x"}, {"a": "y"}]),
        sliced=lambda: o.slice_tensors({"a": torch.arange(4), "b": "x"}, slice(0, 2), process_index=0, num_processes=1),
        lists=lambda: o.listify({"a": torch.ones(2).bfloat16(), "b": torch.tensor(1), "c": "x"}),
        sent=lambda: o.send_to_device({"a": one, "b": "x", "c": [one]}, "meta", skip_keys=["a"]),
        sent_deep=lambda: o.send_to_device([{"a": {"z": one, "y": one}}], "meta", skip_keys="z"),
        sent_object=lambda: o.send_to_device([Movable(), 3, Pair(one, one)], "meta", non_blocking=True),
        honored=lambda: [
            o.honor_type((1,), iter([3])),
            o.honor_type(Pair(1, 2), iter([3, 4])),
            o.honor_type([1], iter([2])),
        ],
        applied=lambda: o.recursively_apply(lambda x, y, z=0: x + y + z, {"a": [one], "b": "x"}, 2, z=3),
        applied_test=lambda: o.recursively_apply(lambda x: x + 1, {"a": [1]}, test_type=lambda x: isinstance(x, int)),
        applied_other=lambda: o.recursively_apply(lambda x: x, {"a": "x"}, error_on_other_type=True),
        named=lambda: [
            o.is_namedtuple(Pair(1, 2)),
            o.is_namedtuple((1, 2)),
            o.is_torch_tensor(one),
            o.is_torch_tensor(1),
        ],
        float32=lambda: o.convert_to_fp32({"a": torch.ones(1).half(), "b": one, "c": torch.ones(1).double(), "d": "x"}),
        wrapper=lambda: o.ConvertOutputsToFp32(nn.functional.relu)(torch.ones(1).half()),
        wrapper_pickled=lambda: pickle.dumps(o.ConvertOutputsToFp32(nn.functional.relu)),
        wrapper_function=lambda: o.convert_outputs_to_fp32(nn.functional.relu)(torch.ones(1).half()),
        numbers=lambda: [list(o.TENSOR_INT_TO_DTYPE.items()), list(o.TENSOR_TYPE_TO_INT.values())],
        checked=lambda: [
            o.verify_operation(lambda tensor: tensor + 1)(tensor=one),
            o.chained_operation(lambda tensor: tensor)(one),
        ],
        gathered_parameters=lambda: o.GatheredParameters([]).__enter__(),
        debug=debug,
    )


def debug():
    """ACCELERATE_DEBUG_MODE: shapes are compared before each operation."""
    if PartialState().num_processes == 1:
        return None
    rank = PartialState().process_index
    PartialState().debug = True
    kind = operations.DistributedOperationException
    caught = []
    tries = {
        "gather": lambda: operations.gather(torch.ones(rank + 1)),
        "reduce": lambda: operations.reduce({"a": torch.ones(rank + 1)}),
        "broadcast": lambda: operations.broadcast(torch.ones(rank + 1)),
        "pad": lambda: operations.pad_across_processes(torch.ones(rank + 1)),
        "dims": lambda: operations.pad_across_processes(torch.ones(1) if rank else torch.ones(1, 1)),
        "fine": lambda: operations.gather(torch.ones(1)),
    }
    try:
        for name, attempt in tries.items():
            try:
                attempt()
            except kind as error:
                text = str(error)
                caught.append(
                    [name, f"accelerate.utils.operations.{name}" in text, name == "dims" or "Process 1: " in text]
                )
    finally:
        PartialState().debug = False
    return caught


def random_numbers():
    def drawn():
        return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]

    def shared(kinds, **named):
        rank = PartialState().process_index
        torch.manual_seed(rank + 5)
        random.seed(rank + 5)
        streams.synchronize_rng_states(kinds, **named)
        return [random.random(), float(torch.rand(1))]

    def seeded(*args, **named):
        set_seed(*args, **named)
        return drawn()

    def generator():
        own = torch.Generator().manual_seed(PartialState().process_index)
        streams.synchronize_rng_states(["generator"], generator=own)
        return float(torch.rand(1, generator=own))

    return answers(
        seed=lambda: seeded(3),
        own_seed=lambda: seeded(3, device_specific=True),
        negative=lambda: set_seed(-3),
        torch=lambda: shared(["torch"]),
        generator=generator,
        no_generator=lambda: shared(["generator"]),
        xpu=lambda: shared(["xpu"]),
        unknown=lambda: shared(["foo"]),
    )


def fitting(limit, **named):
    """Sizes that a function was called with until memory sufficed."""
    tried = []

    @memory.find_executable_batch_size(**named)
    def run(batch_size):
        tried.append(batch_size)
        if batch_size > limit:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    try:
        return [run(), run(), tried]
    except Exception as error:
        return [type(error).__mro__[-3].__name__, "No executable batch size found, reached zero." in str(error), tried]


def sizes():
    left = iter([9, 5, 2])

    @memory.find_executable_batch_size
    def takes_none():
        return 1

    @memory.find_executable_batch_size(starting_batch_size=16)
    def takes_one(batch_size, other):
        return [batch_size, other]

    errors = [
        RuntimeError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        RuntimeError("x"),
        ValueError("out of memory."),
    ]
    return answers(
        shrunk=lambda: fitting(90, starting_batch_size=128),
        never=lambda: fitting(0, starting_batch_size=3),
        own=lambda: fitting(3, starting_batch_size=16, reduce_batch_size_fn=lambda: next(left)),
        takes_none=lambda: takes_none(),
        takes_one=lambda: [takes_one(3), takes_one(other=4)],
        passed_too=lambda: takes_one(128, 3),
        about_memory=lambda: [memory.should_reduce_batch_size(error) for error in errors],
        released=lambda: [memory.release_memory(1, 2), memory.clear_device_cache()],
    )


# -- the environment -----------------------------------------------------------------------------------------


def variables():
    e = environment
    os.environ.update(WORD="maybe", MINUS="-1", SEVEN="7")

    def patched():
        os.environ["FOO_BAR"] = "before"
        with e.patch_environment(foo_bar=3, path_x="x"):
            inside = [os.environ["FOO_BAR"], os.environ["PATH_X"]]
        return [inside, os.environ.pop("FOO_BAR"), "PATH_X" in os.environ]

    def cleared():
        with e.clear_environment():
            inside = dict(os.environ)
            os.environ["NEW"] = "1"
        return [inside, os.environ["SEVEN"], "NEW" in os.environ]

    return answers(
        true=lambda: [
            e.str_to_bool(word)
            for word in ["y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0", "Y", "TRUE"]
        ],
        true_bool=lambda: [e.str_to_bool("y", to_bool=True), e.str_to_bool("off", to_bool=True)],
        neither=lambda: e.str_to_bool("maybe"),
        flag=lambda: [e.parse_flag_from_env("NOT_THERE"), e.parse_flag_from_env("SEVEN_", True)],
        no_flag=lambda: e.parse_flag_from_env("WORD"),
        choice=lambda: [
            e.parse_choice_from_env("WORD"),
            e.parse_choice_from_env("NO"),
            e.parse_choice_from_env("NO", "z"),
        ],
        number=lambda: [
            e.get_int_from_env(["MINUS", "SEVEN"], 3),
            e.get_int_from_env(["MINUS"], 3),
            e.get_int_from_env([], 3),
        ],
        no_number=lambda: e.get_int_from_env(["WORD"], 3),
        libraries=lambda: e.are_libraries_initialized("torch", "nothing_like_it"),
        kind=lambda: e.get_current_device_type(),
        peers=lambda: e.check_cuda_p2p_ib_support(),
        cpu=lambda: [e.get_cpu_distributed_information().rank, e.CPUInformation().world_size],
        cores=lambda: e.set_numa_affinity(0),
        patched=patched,
        cleared=cleared,
        purged=purged,
        versions=lambda: [
            compare_versions("torch", ">", "1.0"),
            compare_versions("torch", "<", "1.0"),
            is_torch_version(">=", "2.6"),
        ],
        no_operation=lambda: compare_versions("torch", "~", "1.0"),
        no_library=lambda: compare_versions("nothing_like_it", ">", "1.0"),
        bar=lambda: [list(tqdm(range(2), disable=True)), tqdm(range(1), file=open(os.devnull, "w")).disable],
        old_bar=lambda: tqdm(True, range(2)),
        deepspeed=lambda: imports.deepspeed_required(lambda: 1)(),
        devices=lambda: [
            bool(getattr(imports, f"is_{kind}_available")())
            for kind in ["npu", "mlu", "xpu", "hpu", "musa", "sdaa", "neuron", "mps", "fp8"]
        ],
    )


def purged():
    """What tests leave of accelerate's variables, in a class and in one that inherits from it."""

    @environment.purge_accelerate_environment
    class Tests:
        def test_one(self):
            os.environ["ACCELERATE_ONE"] = "1"

    class More(Tests):
        def test_two(self):
            os.environ["ACCELERATE_TWO"] = "1"

    @environment.purge_accelerate_environment
    def function():
        os.environ["ACCELERATE_KEPT"] = "2"
        os.environ["ACCELERATE_THREE"] = "1"

    os.environ["ACCELERATE_KEPT"] = "1"
    Tests().test_one()
    More().test_one()
    More().test_two()
    function()
    left = [name for name in ("ONE", "TWO", "THREE") if f"ACCELERATE_{name}" in os.environ]
    return [left, os.environ.pop("ACCELERATE_KEPT"), function.__name__]


# -- modules and logs ----------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
        self.head = nn.Linear(1, 1)


def modules():
    blocks, wrapped = Blocks(), nn.DataParallel(nn.Linear(1, 1))
    compiled, regions = torch.compile(wrapped, backend="eager"), other.compile_regions(blocks, backend="eager")
    tied = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    tied[1].weight = tied[0].weight
    in_place = Blocks()
    name_of = lambda module: type(module).__name__  # noqa: E731
    return answers(
        unwrapped=lambda: [name_of(other.extract_model_from_parallel(each)) for each in (wrapped, compiled, blocks)],
        uncompiled=lambda: name_of(other.extract_model_from_parallel(compiled, keep_torch_compile=False)),
        inside=lambda: name_of(other.extract_model_from_parallel(compiled)._orig_mod),
        recursive=lambda: [
            name_of(each) for each in other.extract_model_from_parallel(nn.Sequential(wrapped), recursive=True)
        ],
        regions=lambda: [
            name_of(regions),
            [name_of(each) for each in regions.layers],
            name_of(regions.head),
            list(regions.state_dict()),
        ],
        region_questions=lambda: [
            other.has_compiled_regions(regions),
            other.is_compiled_module(regions),
            other.has_compiled_regions(blocks),
        ],
        regions_back=lambda: other.extract_model_from_parallel(regions, keep_torch_compile=False) is blocks,
        whole=lambda: name_of(other.compile_regions(nn.Linear(1, 1), backend="eager")),
        in_place=lambda: [
            other.compile_regions_deepspeed(in_place, backend="eager"),
            in_place.layers[0]._compiled_call_impl is None,
            in_place._compiled_call_impl is None,
            in_place.head._compiled_call_impl is None,
        ],
        repeated=lambda: [
            other.is_repeated_blocks(blocks.layers),
            other.is_repeated_blocks(nn.ModuleList()),
            other.has_repeated_blocks(blocks),
        ],
        children=lambda: [name for name, _ in other.get_module_children_bottom_up(blocks, return_fqns=True)],
        kinds=lambda: [
            name_of(each)
            for each in other.get_module_children_bottom_up(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())))
        ],
        clean=lambda: list(other.clean_state_dict_for_safetensors(tied.state_dict())),
        contiguous=lambda: other.clean_state_dict_for_safetensors({"a": torch.ones(4, 2).t()})["a"].is_contiguous(),
        tp=lambda: other.get_model_tp_size(blocks),
        port=lambda: [other.get_free_port() > 0, other.is_port_in_use(1)],
        names=lambda: [other.get_pretty_name(each) for each in (nn.Linear, nn.Linear(1, 1), len, 3)],
        merged=lambda: other.merge_dicts({"a": {"b": 1}, "x": 2}, {"a": {"c": 1}}),
    )


def logs():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append([record.levelname, record.getMessage(), record.name])
    name, level = "a_script", logging.getLogger().level
    logging.getLogger(name).addHandler(handler)
    try:
        logger = get_logger(name, "DEBUG")
        logger.info("main")
        logger.info("all %s", 3, main_process_only=False)
        logger.warning("in order", in_order=True, main_process_only=False)
        for _ in range(2):
            logger.warning_once("once")
        levels = [logging.getLogger(name).level, logging.getLogger().level, logger.isEnabledFor(10)]
    finally:
        logging.getLogger().setLevel(level)
    return answers(
        records=lambda: records,
        levels=lambda: [*levels, logger.name, type(logger).__name__],
        unknown=lambda: get_logger(name, "FOO"),
        should=lambda: [type(logger)._should_log(True), type(logger)._should_log(False)],
    )


def everything():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = (tensors, random_numbers, sizes, variables, modules, logs)
        return {part.__name__: part() for part in parts}
