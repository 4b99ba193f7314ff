"""Data from a folder that the user gives, or made up for a try; all of it fits on the device."""

from __future__ import annotations

import hashlib
import lzma
import os
import pathlib
import random
import tempfile
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.machine import DEVICE

PIXELS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # mean and standard deviation of CIFAR-10's channels


class Text(NamedTuple):
    train: Tensor  # [bytes] uint8
    valid: Tensor
    about: Mapping[str, Any] = MappingProxyType({})  # for the log


class Shards(NamedTuple):
    train: list[Tensor]  # [tokens] uint16, mapped from their files
    valid: Tensor


class Split(NamedTuple):
    images: Tensor  # [n, 3, side, side] uint8
    labels: Tensor  # [n]


class Images(NamedTuple):
    train: Split
    valid: Split


def tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(DEVICE)


def wikitext(folder: pathlib.Path) -> Text:
    """The bytes of ``train.txt.xz`` and ``valid.txt.xz``."""
    return Text(*(tensor(lzma.open(folder / name).read()) for name in ("train.txt.xz", "valid.txt.xz")))


EVERY, ENOUGH = 50, 2**20  # every so manieth file is held out for validation, until there are so many bytes


def folders(paths: Iterable[pathlib.Path], patterns: Iterable[str]) -> Text:
    """The bytes of all files below some folders whose names match a pattern, each once however often it is there.

    Their order is shuffled, and depends on their contents and on their paths in the folders only.
    """
    files = contents(paths, patterns)
    random.Random(0).shuffle(files)
    train, valid = list[bytes](), list[bytes]()
    for i, file in enumerate(files):
        hold_out = i % EVERY == 0 and sum(map(len, valid)) < ENOUGH
        (valid if hold_out else train).append(file)
    if not train:
        raise ValueError(f"{len(files)} different files match; give a folder and a pattern with two of them at least")
    trained, held = b"".join(train), b"".join(valid)[:ENOUGH]
    about = {"files": len(train), "bytes": len(trained), "valid_files": len(valid), "valid_bytes": len(held)}
    return Text(tensor(trained), tensor(held), about | {"sha256": hashlib.sha256(trained + held).hexdigest()})


def contents(paths: Iterable[pathlib.Path], patterns: Iterable[str]) -> list[bytes]:
    """What is in the files, in the order of their paths in the folders; of those that are equal, the first."""
    found = {(path.relative_to(folder).as_posix(), path) for folder in paths for glob in patterns for path in folder.rglob(glob)}
    read = ((name, path.read_bytes()) for name, path in found if path.is_file())
    named = sorted((name, hashlib.sha256(text).digest(), text) for name, text in read if text)
    return list({digest: text for _, digest, text in reversed(named)}.values())[::-1]


HEADER, MAGIC, VERSION = 1024, 20240520, 1  # bytes before the tokens, and how they begin
VALIDATED = 20 * 2**19  # tokens


def shards(folder: pathlib.Path) -> Shards:
    """The tokens of the files with ``train`` and ``val`` in their names; of the latter as many as are validated on."""
    train, valid = ([shard(path) for path in sorted(folder.glob(f"*{word}*.bin"))] for word in ("train", "val"))
    if not (train and valid):
        raise ValueError(f"{folder} has {len(train)} files *train*.bin and {len(valid)} files *val*.bin, and needs some of both")
    return Shards(train, torch.cat([x[: VALIDATED + 1] for x in valid])[: VALIDATED + 1])


def shard(path: pathlib.Path) -> Tensor:
    """The tokens of one file: 256 int32, of which the third is their number, then 2 bytes each."""
    size = path.stat().st_size
    if size < HEADER:
        raise ValueError(f"{path} has {size} bytes, which is less than the header of {HEADER}")
    words = torch.from_file(str(path), size=size // 2, dtype=torch.uint16)
    magic, version, number = words[:6].view(torch.int32).tolist()
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path} begins with {magic}, {version}, and a file of tokens with {MAGIC}, {VERSION}")
    if size != HEADER + 2 * number:
        raise ValueError(f"{path} says that it has {number:,} tokens, but its size is that of {(size - HEADER) // 2:,}")
    return words[HEADER // 2 :]


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


def made_up_tokens() -> Shards:
    tokens = (torch.arange(1000) % 50).to(torch.uint16)
    return Shards([tokens[:500], tokens[500:]], tokens[:300])


def made_up_images(side: int = 8, number: int = 64) -> Images:
    """Noise whose brightness is the class."""
    generator = torch.Generator().manual_seed(0)

    def make(n: int) -> Split:
        labels = torch.arange(n) % 10
        noise = torch.randint(0, 60, (n, 3, side, side), generator=generator)
        return Split((noise + 19 * labels[:, None, None, None]).byte().to(DEVICE), labels.to(DEVICE))

    return Images(make(number), make(number // 2))
