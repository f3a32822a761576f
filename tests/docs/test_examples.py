"""The examples beside the quickstart: each learns, at one process and at two, and says so once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from warm_python import executable

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LAUNCH = {1: [], 2: ["-m", "paceline", "launch", "--procs", "2"]}
TRANSFORMERS_MODULES = (
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "sklearn.metrics",
)


@pytest.fixture(scope="module")
def python() -> str:
    """A Python that has imported what the examples with transformers import."""
    return executable(*TRANSFORMERS_MODULES)


def run(
    python: str, width: int, script: str, arguments: Sequence[object], folder: Path, fails: bool = False
) -> tuple[str, str]:
    """What a run of an example printed to stdout and stderr."""
    command = [python, *LAUNCH[width], str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout, done.stderr


def logged(file: Path) -> list[dict]:
    """The values of each line that a run logged, with its step."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{"step": line["step"], **line["values"]} for line in lines if line["event"] == "log"]


# -- text classification -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentences(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    run(sys.executable, 1, "text_classification/make_data.py", ["--to", "train.json", "--sentences", 1300], folder)
    return folder / "train.json"


@pytest.mark.timeout(300)
def test_sentences_are_told_apart_alike_on_one_process_and_two(python, sentences, tmp_path):
    arguments = ["--data", sentences, "--epochs", 2, "--eval-step", 60, "--batch-size", 32, "--learning-rate", "3e-3"]
    losses = {}
    for width in LAUNCH:
        printed, _ = run(python, width, "text_classification/train.py", [*arguments, "--out", f"out{width}"], tmp_path)
        assert printed.count("macro avg") == 1 and f"{width} process" in printed
        accuracy = float(re.search(r"accuracy +([\d.]+) +130", printed)[1])
        assert 0.35 < accuracy < 1.0  # chance is 0.2, one label in 20 is wrong
        losses[width] = [float(loss) for loss in re.findall(r"step: \d+/66 loss: ([\d.]+)", printed)]
    assert len(losses[1]) == 4
    # Each step magnifies what rounding did before it. How much it is at step 60 depends on the processor's kind: 0.007
    # was seen. In float64 all steps agree to the last digit that is printed.
    assert losses[2][:3] == pytest.approx(losses[1][:3], abs=1e-3)


def test_a_malformed_file_of_the_user_is_explained_once(python, tmp_path):
    (tmp_path / "mine.json").write_text('[["好", 3], ["x", 6], [1, 2], "q"]', encoding="utf-8")
    _, errors = run(python, 2, "text_classification/train.py", ["--data", "mine.json"], tmp_path, fails=True)
    assert errors.count("mine.json: 3 of 4 entries are not like") == 1
    for line in (
        "entry 1: the label id is 6; it should be 0 to 5",
        "entry 2: the text is 1",
        'entry 3: "q" is not a pair',
    ):
        assert line in errors


def test_labels_are_the_same_where_they_are_made_and_where_they_are_read():
    files = [
        (EXAMPLES / "text_classification" / name).read_text(encoding="utf-8") for name in ("make_data.py", "train.py")
    ]
    of_the_data, of_the_training = (re.search(r"^LABELS = .*$", text, re.MULTILINE)[0] for text in files)
    assert of_the_data == of_the_training


# -- the script written for DeepSpeed ------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_deepspeed_program_learns_alike_on_one_process_and_two_and_writes_what_its_config_asks(
    python, sentences, tmp_path
):
    example = EXAMPLES / "emotion_deepspeed"
    few = tmp_path / "few.json"
    few.write_text(json.dumps(json.loads(sentences.read_text(encoding="utf-8"))[:640]), encoding="utf-8")
    losses = {}
    for width in (1, 2):
        words = ["-m", "paceline", "deepspeed", "--num_gpus", str(width), str(example / "train.py"), "--deepspeed"]
        words += ["--deepspeed_config", str(example / "ds_config.json"), "--data", str(few), "--epochs", "1"]
        folder = tmp_path / str(width)
        folder.mkdir()
        command = [python, *words, "--log-step", "4"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("macro avg") == 1
        losses[width] = [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
    assert len(losses[1]) == 4  # of 16 steps
    assert losses[2] == pytest.approx(losses[1], abs=5e-3)  # float16; later steps magnify what rounding did
    assert "all_reduce" in done.stdout.split("Comm. Op")[1]
    written = tmp_path / "2" / "runs" / "emotion_deepspeed"
    rates = (written / "logs" / "csv" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rates[:2] == ["step,lr", "32,0.0"] and len(rates) == 17
    assert "BertEncoder" in (written / "flops.txt").read_text()
    assert list((written / "logs" / "tensorboard").iterdir()) and (written / "checkpoints" / "latest").exists()


# -- transformers, with scripts that know accelerate alone ---------------------------------------------------------


@pytest.fixture(scope="module")
def clm_folder(python, tmp_path_factory) -> Path:
    """A folder with the data, the model and the tokenizer that the scripts for transformers need."""
    folder = tmp_path_factory.mktemp("clm")
    run(python, 1, "causal_language_model/make_data.py", ["--vocab-size", 300], folder)
    return folder


def launch_served(script: str, procs: int, arguments: Sequence[object], folder: Path) -> str:
    """What a script printed that was launched with accelerate's names served."""
    command = [
        executable("warm_accelerate"),
        "-m",
        "paceline",
        "launch",
        "--compat",
        "accelerate",
        "--cpu",
        "--procs",
        str(procs),
    ]
    command += [str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


FILES = ["--model_name_or_path", "runs/clm/gpt2", "--train_file", "runs/clm/validation.json"]
FILES += ["--validation_file", "runs/clm/validation.json", "--block_size", 32]


@pytest.mark.timeout(300)
def test_a_language_model_is_trained_by_the_trainer_alike_on_one_process_and_two(clm_folder):
    evaluated = {}
    for procs, rows in ((1, 16), (2, 8)):
        arguments = [
            *FILES,
            "--output_dir",
            f"trained{procs}",
            "--do_train",
            "--do_eval",
            "--max_steps",
            6,
            "--learning_rate",
            "3e-3",
        ]
        arguments += [
            "--per_device_train_batch_size",
            rows,
            "--gradient_accumulation_steps",
            2,
            "--disable_tqdm",
            "true",
        ]
        launch_served("causal_language_model/run_clm.py", procs, [*arguments, "--report_to", "none"], clm_folder)
        assert (clm_folder / f"trained{procs}" / "model.safetensors").exists()
        evaluated[procs] = json.loads(
            (clm_folder / f"trained{procs}" / "eval_results.json").read_text(encoding="utf-8")
        )
    assert evaluated[1]["perplexity"] < 250  # of 300 tokens
    # Dropout draws other numbers on two processes.
    assert evaluated[2]["eval_loss"] == pytest.approx(evaluated[1]["eval_loss"], rel=0.02)


@pytest.mark.timeout(300)
def test_the_same_with_a_loop_of_ones_own_goes_on_at_another_width(clm_folder):
    arguments = [*FILES, "--output_dir", "loop", "--num_train_epochs", 2, "--per_device_train_batch_size", 16]
    script = "causal_language_model/run_clm_no_trainer.py"
    whole = re.findall(r"perplexity ([\d.]+)", launch_served(script, 2, arguments, clm_folder))
    resumed = launch_served(script, 1, [*arguments, "--resume_from_checkpoint", "loop/epoch_0"], clm_folder)
    again = re.findall(r"perplexity ([\d.]+)", resumed)
    assert len(whole) == 2 and len(again) == 1 and float(whole[1]) < float(whole[0])
    # One process takes batches half as large: what goes on is the training, not its numbers.
    assert float(again[0]) == pytest.approx(float(whole[1]), rel=0.1)


@pytest.mark.timeout(300)
def test_an_adapter_is_trained_and_merged(clm_folder):
    arguments = ["--steps", 2, "--train_file", "runs/clm/validation.json"]
    printed = launch_served("lora/train.py", 2, arguments, clm_folder)
    before, after = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", printed).groups())
    assert after < before
    for written in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (clm_folder / "runs" / "lora" / written).exists()


# -- the notebooks -----------------------------------------------------------------------------------------------


def test_the_loop_gives_the_same_accuracies_on_one_process_and_two(tmp_path):
    lines = {}
    for width in LAUNCH:
        printed, bars = run(executable(), width, "notebook_loop/loop.py", [], tmp_path)
        accuracies = re.findall(r"(\d)/5: 100%\|█+\| 100/100 \[[^\]]*((?:train|val)/acc)=([\d.]+)\]", bars)
        lines[width] = list(dict.fromkeys(accuracies))  # a bar is drawn again when it is closed
        assert len(lines[width]) == 10
        assert float(lines[width][-1][2]) > 0.7  # chance is 0.2
        assert printed.count("training finished") == 1
        trained, again = (
            re.search(rf"{text}: val/acc ([\d.]+)", printed)[1] for text in ("training finished", "read back")
        )
        assert trained == again == lines[width][-1][2]
    assert lines[1] == lines[2]


def notebook_outputs(path: Path) -> tuple[str, str]:
    """What the cells of a notebook print, and the value of the last one."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    # By default the client waits 4 s for outputs, and then goes on without them.
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, iopub_timeout=60, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    return printed, next(
        (output.data["text/plain"] for output in outputs[::-1] if output.output_type == "execute_result"), ""
    )


def test_the_loop_as_a_notebook_is_the_script_and_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    written = EXAMPLES / "notebook_loop" / "loop.ipynb"
    for file in (EXAMPLES / "to_notebook.py", written.with_suffix(".py")):
        shutil.copy(file, tmp_path)
    subprocess.run([sys.executable, "to_notebook.py", "loop.py"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert nbformat.read(tmp_path / "loop.ipynb", 4) == nbformat.read(written, 4), "run examples/to_notebook.py"
    printed, _ = notebook_outputs(tmp_path / "loop.ipynb")
    assert "training finished: val/acc 0.7" in printed


@pytest.mark.parametrize("width", LAUNCH)
def test_images_are_classified_from_a_notebook(width, tmp_path):
    for name in ("quickstart", "image_notebook"):
        shutil.copytree(EXAMPLES / name, tmp_path / "examples" / name)
    path = tmp_path / "examples" / "image_notebook" / "digits.ipynb"
    text = path.read_text(encoding="utf-8").replace("num_processes=2", f"num_processes={width}")
    path.write_text(text, encoding="utf-8")
    printed, accuracy = notebook_outputs(path)
    assert printed.count("Launching training on") == 2
    assert re.findall(r"epoch (\d): [\d.]+$", printed, re.MULTILINE) == ["0", "1", "2", "3", "4"]
    assert float(accuracy) > 0.9  # chance is 0.1
    assert (tmp_path / "runs" / "image_notebook" / "model" / "model.safetensors").exists()


def test_notebooks_are_committed_without_outputs():
    for path in EXAMPLES.rglob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path


# -- the language model ------------------------------------------------------------------------------------------

SMALL = ["--modules", 2, "--layers", 1, "--width", 64, "--block", 64, "--vocab-size", 512, "--batch-size", 4,
         "--log-every", 5, "--save-every", 1000]  # fmt: skip


@pytest.fixture(scope="module")
def language_model(python, tmp_path_factory) -> Path:
    """A folder in which the example was compared on one process and two."""
    folder = tmp_path_factory.mktemp("language_model")
    printed, _ = run(python, 1, "language_model/compare.py", SMALL, folder)
    (folder / "said.txt").write_text(printed)
    return folder


@pytest.mark.timeout(300)
def test_losses_are_those_of_one_process(language_model):
    one, two = (logged(language_model / "runs" / f"language_model_{width}" / "metrics.jsonl") for width in LAUNCH)
    assert len(one) == len(two) > 15
    for first, second in zip(one, two, strict=True):
        assert first["step"] == second["step"]
        for name in first.keys() - {"tokens_per_s"}:
            assert second[name] == pytest.approx(first[name], rel=2e-4), name
    assert one[-2]["loss"] < one[0]["loss"] - 0.5
    table = (language_model / "said.txt").read_text()
    assert "difference" in table and "times as many" in table


@pytest.mark.timeout(300)
def test_an_interrupted_run_resumes_at_another_width_with_the_same_losses(python, language_model):
    arguments = [*SMALL, "--out", "runs/interrupted"]
    printed, _ = run(python, 2, "language_model/train.py", [*arguments, "--stop-after", 7], language_model)
    assert printed.count("stopped after step 7") == 1
    printed, _ = run(python, 1, "language_model/train.py", [*arguments, "--resume"], language_model)
    assert "resumed after step 7, in epoch 1" in printed and printed.count("it writes") == 1
    whole = logged(language_model / "runs" / "language_model_1" / "metrics.jsonl")
    parts = logged(language_model / "runs" / "interrupted" / "metrics.jsonl")
    assert [line["step"] for line in parts] == [line["step"] for line in whole]
    assert [line.get("loss") for line in parts[:-1]] == pytest.approx([line["loss"] for line in whole[:-1]], rel=2e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_learns_in_half_precision(precision, python, language_model):
    arguments = [*SMALL, "--out", f"runs/{precision}", "--mixed-precision", precision, "--stop-after", 8]
    printed, _ = run(python, 2, "language_model/train.py", arguments, language_model)
    assert f"{precision} mixed precision; 2 processes" in printed
    half = logged(language_model / "runs" / precision / "metrics.jsonl")
    whole = logged(language_model / "runs" / "language_model_1" / "metrics.jsonl")
    assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in whole[:8]], rel=0.02)


# -- any plan ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_one_script_learns_alike_under_every_plan(tmp_path):
    small = ["--steps", 20, "--width", 32, "--layers", 2, "--batch-size", 64, "--length", 32]
    plans = {"one": "", "zero": "--procs 2 --zero 2", "both": "--procs 4 --shard 2 --tp 2", "pipe": "--procs 2 --pp 2"}
    losses = {}
    for name, flags in plans.items():
        command = [executable(), "-m", "paceline", "launch", "--threads", "1", *flags.split()]
        command += [str(EXAMPLES / "any_plan/train.py"), "--out", name, *map(str, small)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("held out: ") == 1
        losses[name] = [line["loss"] for line in logged(tmp_path / name / "metrics.jsonl") if "loss" in line]
    assert losses["one"][1] < losses["one"][0] < 6.0
    for name in plans:
        assert losses[name] == pytest.approx(losses["one"], abs=2e-4), name


# -- a model larger than its device -------------------------------------------------------------------------------


def test_a_model_generates_the_same_with_weights_on_the_disk(python, tmp_path):
    printed, _ = run(python, 1, "device_map/generate.py", ["--layers", 3, "--memory", "16MiB", "--tokens", 4], tmp_path)
    assert printed.endswith("the same tokens each time\n")
    assert printed.count("placement of GPT2LMHeadModel") == 3 and "= disk -> cpu  <- derived: cpu is full" in printed
