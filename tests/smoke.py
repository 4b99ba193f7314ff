"""What an installed lather must do with torch alone. ``make dist`` runs it in an empty environment, far from the sources."""

import importlib.metadata
import io
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import lather


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> float:
    x = torch.linspace(-1, 1, 64)[:, None] * torch.arange(1, 9)
    for _ in range(steps):
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return model, lather.from_adamw(model, lr=1e-2)


def command(*words: object) -> str:
    return subprocess.run([sys.executable, "-m", "lather", *map(str, words)], check=True, capture_output=True, text=True).stdout


def main() -> None:
    warnings.simplefilter("error")  # not before: torch itself warns where there is no NumPy
    package = Path(lather.__file__).parent
    assert "site-packages" in package.parts, f"{package} is not installed"
    assert (package / "py.typed").exists()
    assert importlib.metadata.version("lather") == lather.__version__

    model, opt = make()
    first = train(model, opt, 30)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, saved)
    last = train(model, opt, 30)
    assert last < 0.8 * first, (first, last)

    model, opt = make()
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])
    assert train(model, opt, 30) == last, "a resumed run differs"

    assert command("--version").split() == ["lather", lather.__version__]
    assert json.loads(command("plan", "gpt2", "--json"))
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder, "run.jsonl"), Path(folder, "run.html")
        lather.Monitor(opt, every=2, to=log)
        train(model, opt, 4)
        command("view", log, "--out", page)
        assert "<html" in page.read_text()
    print(f"lather {lather.__version__} trains, resumes, plans and draws with torch {torch.__version__} alone")


if __name__ == "__main__":
    main()
