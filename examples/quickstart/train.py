"""Trains a network that reads handwritten digits, on one process or several, with the same losses.

python examples/quickstart/make_digits.py
python examples/quickstart/train.py                             one process
paceline launch --procs 2 examples/quickstart/train.py          two
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from report import Picture, Report, accuracy, confusion_matrix, per_class
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from paceline import Accelerator, set_seed

LABELS = [str(digit) for digit in range(10)]


class Digits(Dataset):
    """Images named `label_number.png`, from a list of their names.

    With `shift`, each image is moved by up to that many pixels, anew in each epoch. The move depends on the seed, the
    epoch and the image alone, and so not on how many processes read the images.
    """

    def __init__(self, folder: Path, names: str, shift: int = 0, seed: int = 0) -> None:
        self.names = (folder / names).read_text().split()
        self.pixels = [np.array(Image.open(folder / name)) for name in self.names]
        self.shift, self.seed, self.epoch = shift, seed, 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.pixels[index]
        if self.shift:
            draw = np.random.default_rng([self.seed, self.epoch, index])
            down, right = draw.integers(0, 2 * self.shift + 1, size=2)
            height, width = image.shape
            image = np.pad(image, self.shift)[down : down + height, right : right + width]
        return torch.from_numpy(image).unsqueeze(0).float() / 255, int(self.names[index].split("_")[0])


def network() -> nn.Module:
    """Three convolutions and a linear layer. Shape: images [n, 1, 8, 8] -> logits [n, 10].

    All of it is smooth: at the kink of a ReLU or the tie of a max-pool, a difference in the last bit (as between the
    sums of one process and of two) becomes another gradient. Group norm looks at one image at a time, so that a batch
    may be cut anywhere.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.GELU()]
    layers.insert(6, nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


@torch.no_grad()
def evaluate(acc: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The mean loss, and the true and predicted labels of all images, in order, on every rank."""
    model.eval()
    found = []
    for images, labels in loader:
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        found.append(acc.gather_for_metrics((losses, labels, logits.argmax(dim=1))))
    losses, truth, predicted = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    return losses.mean().item(), truth, predicted


def train_epoch(acc: Accelerator, model: nn.Module, optimizer, scheduler, loader: DataLoader, bar: tqdm) -> float:
    """One pass over the images; returns the mean loss over all of them."""
    model.train()
    seen = []
    for images, labels in loader:
        losses = F.cross_entropy(model(images), labels, reduction="none")
        acc.backward(losses.mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(acc.gather_for_metrics(losses.detach()))
        bar.update()
    return torch.cat(seen).mean().item()


def main(args: argparse.Namespace) -> float:
    """Trains, saves, loads the checkpoint again and writes the report; returns the accuracy on the held-out images."""
    began = time.perf_counter()
    set_seed(args.seed)
    # The batch size is that of all processes together, so the results do not depend on the number of processes.
    acc = Accelerator(split_batches=True, data_seed=args.seed, log_with="jsonl", project_dir=args.out.parent)
    learn = Digits(args.data, "train.txt", shift=1, seed=args.seed)
    held_out = Digits(args.data, "heldout.txt")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(learn, batch_size=args.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
    held_out_loader = DataLoader(held_out, batch_size=args.batch_size)
    model, optimizer, loader, scheduler, held_out_loader = acc.prepare(
        model, optimizer, loader, scheduler, held_out_loader
    )
    acc.init_trackers(args.out.name, vars(args))
    acc.print(f"{len(learn)} digits to learn from, {len(held_out)} held out; {where(acc)}\n", flush=True)

    history = []
    for epoch in range(args.epochs):
        learn.epoch = epoch
        with tqdm(
            total=len(loader),
            desc=f"epoch {epoch + 1:2}/{args.epochs}",
            bar_format="{desc} {bar:24} {n_fmt}/{total_fmt}{postfix}",
            ncols=88,  # with the next line: a terminal may not report its size
            nrows=20,
            disable=not acc.is_main_process,
        ) as bar:
            loss = train_epoch(acc, model, optimizer, scheduler, loader, bar)
            held_out_loss, truth, predicted = evaluate(acc, model, held_out_loader)
            matrix = confusion_matrix(truth, predicted, len(LABELS))
            history.append((epoch + 1, loss, held_out_loss, accuracy(matrix)))
            bar.set_postfix_str(f"loss {loss:.3f}, held-out accuracy {accuracy(matrix):.3f}", refresh=False)
        acc.log({"loss": loss, "held_out_loss": held_out_loss, "accuracy": accuracy(matrix)}, step=epoch + 1)

    checkpoint = acc.save_state(args.out / "checkpoint")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # set all weights to zero ...
    acc.load_state(checkpoint)  # ... and load them from the checkpoint
    _, truth, read_back = evaluate(acc, model, held_out_loader)
    if acc.is_main_process:
        print_classes(matrix)
        some, right = read_back[:12].tolist(), int((truth[:12] == read_back[:12]).sum())
        print(f"\nsaved and read back   {args.out / 'checkpoint'}")
        print(f"it reads 12 digits    {' '.join(map(str, some))}   ({right} right)")
        pictures = choose_pictures(held_out, truth.tolist(), read_back.tolist())
        page = write_report(acc, args, history, matrix, pictures, time.perf_counter() - began)
        print(f"report                {page}\nseconds               {time.perf_counter() - began:.1f}")
    acc.end_training()
    return accuracy(matrix)


def where(acc: Accelerator) -> str:
    """Such as `2 processes, cpu`."""
    return f"{acc.num_processes} process{'es' * (acc.num_processes > 1)}, {acc.device.type}"


def print_classes(matrix: np.ndarray) -> None:
    """A line for each class."""
    print("\nclass  precision  recall     f1  images")
    for row in per_class(matrix, LABELS):
        print(f"{row.label:>5}  {row.precision:9.3f}  {row.recall:6.3f}  {row.f1:5.3f}  {row.samples:6}")
    print(f"  all             {accuracy(matrix):8.3f}         {matrix.sum():6}")


def choose_pictures(images: Digits, truth: list[int], predicted: list[int], count: int = 20) -> list[Picture]:
    """First the images with a wrong prediction, then others in order."""
    order = sorted(range(len(images)), key=lambda i: truth[i] == predicted[i])[:count]
    return [Picture(images.pixels[i], LABELS[predicted[i]], LABELS[truth[i]]) for i in order]


def write_report(acc, args, history, matrix, pictures, seconds) -> Path:
    """Writes the report of the run; see `report.py`."""
    _, _, loss, share = history[-1]
    wrong = int(matrix.sum() - matrix.trace())
    report = Report("Handwritten digits", f"{args.epochs} epochs on {where(acc)}")
    report.numbers(
        {
            "held-out accuracy": f"{100 * share:.1f} %",
            "held-out loss": f"{loss:.3f}",
            f"wrong of {matrix.sum()}": str(wrong),
            "seconds": f"{seconds:.1f}",
        }
    )
    report.curves(
        {
            "Loss": {
                "training": [(epoch, loss) for epoch, loss, _, _ in history],
                "held out": [(epoch, loss) for epoch, _, loss, _ in history],
            },
            "Accuracy": {"held out": [(epoch, share) for epoch, _, _, share in history]},
        },
        x_label="epoch",
    )
    report.confusion(matrix, LABELS)
    report.images("Held-out digits, read by the checkpoint that was loaded back; the wrong ones first", pictures)
    report.facts(
        {"processes": acc.num_processes, "device": acc.device, "plan": acc.plan.layout, "seed": args.seed},
        folded={"Every setting and where it came from": acc.plan.explain()},
    )
    return report.write(args.out / "report.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("runs/digits"), help="images (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="results (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, of all processes together")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
