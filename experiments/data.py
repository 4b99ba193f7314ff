"""Data from a folder that the user gives, or made up for a try; all of it fits on the device."""

from __future__ import annotations

import hashlib
import lzma
import os
import pathlib
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import DEVICE

PIXELS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # mean and standard deviation of CIFAR-10's channels


class Text(NamedTuple):
    train: Tensor  # [bytes] uint8
    valid: Tensor


class Split(NamedTuple):
    images: Tensor  # [n, 3, side, side] uint8
    labels: Tensor  # [n]


class Images(NamedTuple):
    train: Split
    valid: Split


def wikitext(folder: pathlib.Path) -> Text:
    """The bytes of ``train.txt.xz`` and ``valid.txt.xz``."""

    def load(name: str) -> Tensor:
        return torch.frombuffer(bytearray(lzma.open(folder / name).read()), dtype=torch.uint8).to(DEVICE)

    return Text(load("train.txt.xz"), load("valid.txt.xz"))


def cifar10(path: pathlib.Path) -> Images:
    """CIFAR-10 from ``cifar10_full_60k_lossy.npz``, or from the folder it is in.

    Unpacking takes seconds, so what came out is kept in the folder for temporary files, under a name made from the file's.
    """
    path = path / "cifar10_full_60k_lossy.npz" if path.is_dir() else path
    stamp = hashlib.sha256(f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime}".encode()).hexdigest()[:16]
    kept = pathlib.Path(tempfile.gettempdir()) / f"lather-cifar10-{stamp}.pt"
    if not kept.exists():
        part = kept.with_suffix(f".{os.getpid()}")
        torch.save([x.cpu() for x in unpack_cifar10(path)], part)
        part.replace(kept)
    images, labels = (x.to(DEVICE) for x in torch.load(kept, weights_only=True))
    return Images(Split(images[:50000], labels[:50000]), Split(images[50000:], labels[50000:]))


def unpack_cifar10(path: pathlib.Path) -> tuple[Tensor, Tensor]:
    """All 60,000 images, [n, 3, 32, 32] uint8, and their labels. Pixels are 8 x 8 x 3 blocks times a basis of 192 components."""
    import numpy as np

    packed = np.load(path)
    basis = torch.from_numpy(packed["basis"]).to(DEVICE)
    coefficients = torch.from_numpy(np.stack([packed[f"c{j:03d}"] for j in range(192)], 1)).to(DEVICE)
    images = []
    for part in coefficients.split(16 * 5000):  # 16 blocks an image, row by row
        blocks = (part.float() @ basis + 128).view(-1, 4, 4, 8, 8, 3)
        pixels = blocks.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, 32, 32)
        images.append(pixels.round().clamp(0, 255).byte())
    labels = np.concatenate([packed["train_labels"], packed["test_labels"]])
    return torch.cat(images), torch.from_numpy(labels).long().to(DEVICE)


# Made up.


def made_up_text() -> Text:
    line = torch.tensor(list(b"All work and no play makes Jack a dull boy. " * 20), dtype=torch.uint8, device=DEVICE)
    return Text(line, line)


def made_up_images(side: int = 8, number: int = 64) -> Images:
    """Noise whose brightness is the class."""
    generator = torch.Generator().manual_seed(0)

    def make(n: int) -> Split:
        labels = torch.arange(n) % 10
        noise = torch.randint(0, 60, (n, 3, side, side), generator=generator)
        return Split((noise + 19 * labels[:, None, None, None]).byte().to(DEVICE), labels.to(DEVICE))

    return Images(make(number), make(number // 2))
