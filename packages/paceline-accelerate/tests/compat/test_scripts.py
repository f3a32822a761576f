"""Users' programs, as they were written for accelerate: paths and devices are adapted to this machine, nothing else.

text_classification.py    a BERT of transformers, its own Trainer class, `torch.distributed` by hand
notebook_loop.py          a notebook's cells: metrics, clipping, checkpoints, a barrier that one process enters
image_classification.py   `notebook_launcher`, fp16, a frozen backbone, OneCycleLR
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
from pathlib import Path

import launched
import pytest

from paceline.testing import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
run = functools.partial(launched.run, warm=["warm_accelerate"])
launch = functools.partial(launched.launch, "accelerate")


@pytest.mark.parametrize("size", [1, 2])
def test_only_several_processes_have_a_process_group(size, tmp_path):
    """As under accelerate's launcher; transformers warns of a group beside one process."""
    script = tmp_path / "state.py"
    script.write_text(
        "import torch.distributed\nfrom accelerate import PartialState\nstate = PartialState()\n"
        "state.print(state.num_processes, torch.distributed.is_initialized(), state.backend)\n"
    )
    assert run(launch(size, script), tmp_path).splitlines()[-1] == {1: "1 False None", 2: "2 True gloo"}[size]


# -- text classification -------------------------------------------------------------------------------------

EMOTIONS = ["天地人你我他", "爱喜欢好美妙", "哭泪悲伤痛苦", "烦厌讨嫌恶心", "怒气火恨骂吼", "笑乐高兴欢快"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """data/train.json in the script's format, and a small BERT where the script looks for one."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(5)
    rows = []
    for number in range(400):
        label = number % 6
        words = [draw.choice(EMOTIONS[label] if draw.random() < 0.7 else "的了是在有不") for _ in range(12)]
        rows.append([" ".join(words), label])
    (folder / "data").mkdir()
    (folder / "data" / "train.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (folder / "output" / "accelerate").mkdir(parents=True)
    model = folder / "model_hub" / "chinese-bert-wwm-ext"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set("".join(EMOTIONS) + "的了是在有不"))]
    run_ranks(lambda: make_bert(model, len(vocabulary)), world=1, group=False)
    (model / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return folder


def make_bert(folder: Path, words: int) -> None:
    """In a process of its own: this one must not have seen transformers without the names that we serve."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=words,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    BertForMaskedLM(config).save_pretrained(folder)


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize("size", [1, 2])
def test_text_classification(corpus: Path, size: int) -> None:
    # It imports deepspeed without need, which is served as well.
    words = launched.launch("accelerate,deepspeed", size, SCRIPTS / "text_classification.py")
    printed = run(words, corpus)
    steps = re.findall(r"【train】 epoch: 1/1 step: (\d+)/(\d+) loss: ([\d.]+)", printed)
    assert len(steps) == -(-368 // (32 * size)) and float(steps[-1][2]) < 2.2
    assert printed.count("weighted avg") == 1, "the report is printed once"
    assert (corpus / "output" / "accelerate" / "multi-gpu-accelerate-cls.pt").is_file()


# -- the notebook's loop -------------------------------------------------------------------------------------


def notebook_loop(folder: Path, **changes: str) -> Path:
    """The notebook's cells as a script, with shorter epochs."""
    text = (SCRIPTS / "notebook_loop.py").read_text(encoding="utf-8")
    for old, new in {"epochs = 5": "epochs = 2", "data_len = 10000": "data_len = 950", **changes}.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "loop.py"
    path.write_text(text, encoding="utf-8")
    (folder / "accelerator_checkpoint").mkdir()
    return path


def test_notebook_loop_on_one_process(tmp_path: Path) -> None:
    printed = run(["-m", "paceline.compat", str(notebook_loop(tmp_path))], tmp_path)
    assert "2/2: 100%" in printed and "train/acc=" in printed and "training finish" in printed
    assert sorted(os.listdir(tmp_path / "accelerator_checkpoint")) == [
        "accelerator.last.pth",
        "model.safetensors",
        "optimizer.bin",
        "pytorch_model.bin",
        "random_states_0.pkl",
    ]


@pytest.mark.needs("lens")
def test_notebook_loop_on_two_processes_names_the_barrier_that_one_enters(tmp_path: Path) -> None:
    """Debug mode explains the hang. The mean over `all_losses` is adapted: its tensors hold one value a process."""
    line = "torch.mean(torch.tensor(all_losses))"
    script = notebook_loop(tmp_path, **{line: "torch.mean(torch.stack(all_losses))"})
    printed = run(launch(2, script, "--debug", "--timeout-s", "20"), tmp_path, fails=True)
    barrier = script.read_text(encoding="utf-8").splitlines().index("        accelerator.wait_for_everyone()") + 1
    assert f"loop.py:{barrier}" in printed, printed[-4000:]
    assert re.search(r"\[collective-(diverged|missing)\]", printed), printed[-4000:]


# -- image classification ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Folder with handwritten digits as `label_n.jpg`, two levels above where the notebook lies."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    (folder / "images").mkdir()
    (folder / "examples" / "notebooks").mkdir(parents=True)
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:240], digits.target[:240], strict=True)):
        image = Image.fromarray((pixels * 15).astype("uint8")).resize((32, 32), Image.Resampling.NEAREST)
        image.save(folder / "images" / f"{label}_{number}.jpg")
    return folder


@pytest.mark.parametrize("size", [1, 2])
def test_image_classification(images: Path, size: int) -> None:
    folder = images / "examples" / "notebooks"
    text = (SCRIPTS / "image_classification.py").read_text(encoding="utf-8")
    script = folder / f"digits_on_{size}.py"
    # One worker for each loader, since this machine may have two cores.
    text = text.replace("num_processes=2", f"num_processes={size}").replace("num_workers=4", "num_workers=1")
    script.write_text(text, encoding="utf-8")
    printed = run(["-m", "paceline.compat", str(script)], folder, PYTHONPATH=str(SCRIPTS / "stand_ins"))
    accuracies = [float(percent) for percent in re.findall(r"epoch \d: ([\d.]+)", printed)]
    assert len(accuracies) == 5 and accuracies[-1] > 40, printed[-4000:]
    place = "CPU." if size == 1 else f"{size}"
    assert f"Launching training on {place}" in printed
