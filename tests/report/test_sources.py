"""Models for plans: from tables, functions and configs. The plan is true to the byte for each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lather
from lather import cli
from lather.presets import PRESETS
from lather.report.models import MODELS, gpt2, llama, load, on_meta, shapes_of, vit

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.embed = nn.Embedding(40, 16)
        self.qkv = nn.Linear(16, 48)
        self.conv = nn.Conv2d(4, 8, 3)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

def stubborn():
    torch.ones(1).item()  # the meta device has no numbers
    return Net()

def broken():
    raise RuntimeError("no weights here")

def wrong():
    return 3
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "small": {"factors": "packed", "root_dtype": "bfloat16", "max_preconditioner_dim": 8},
    "momentum": {"momentum": 0.9},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "some_nets", raising=False)
    return tmp_path


def state_bytes(opt: lather.Shampoo) -> int:
    """Of a real optimizer after a step."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p) if p.requires_grad else None
    opt.step()
    return sum(x.nbytes for entry in opt.state.values() for key, x in entry.items() if key != "step")


def check_bytes(planned: nn.Module, real: nn.Module, preset: str = "Shampoo", **options: Any) -> None:
    """The plan of a model without memory, against that of a real one and what a step then takes."""
    report, opt = lather.plan(planned, device="cpu", preset=preset, **options), PRESETS[preset](real, **options)
    assert report.to_dict() == opt.plan().to_dict()
    assert report.state_bytes == state_bytes(opt) > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_functions(folder: Path, preset: str) -> None:
    model = load("some_nets:Net")
    assert isinstance(model, nn.Module) and all(p.is_meta for p in model.parameters())
    check_bytes(model, type(model)(), preset)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(folder: Path, name: str) -> None:
    model = load("some_nets:Net")
    check_bytes(model, type(model)(), **OPTIONS[name])


def test_a_function_that_needs_numbers_is_run_on_the_host(folder: Path) -> None:
    model = load("some_nets:stubborn")
    assert isinstance(model, nn.Module) and not any(p.is_meta for p in model.parameters())


SMALL = {
    "gpt2": lambda: gpt2(2, 64, 96, 16),
    "llama": lambda: llama(1, 32, 80, 4, 2, 96),
    "tied": lambda: llama(1, 32, 80, 4, 2, 96, tied=True),
    "vit": lambda: vit(1, 64, 4, 16, 10),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_versions_of_tables(name: str) -> None:
    check_bytes(on_meta(SMALL[name]), SMALL[name](), max_preconditioner_dim=48)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-70b"])  # the largest is planned in tests/test_docs.py
def test_tables(name: str) -> None:
    """As the optimizer itself would plan. It has a place for every parameter, and no more state than six times its size or so."""
    model = load(name)
    assert isinstance(model, nn.Module)
    report, own = lather.plan(model), lather.Shampoo(model).plan()
    assert (report.memory, report.params) == (own.memory, own.params)
    assert {row.name: row.shape for row in report.params} == shapes_of(model)


# Beside transformers.


def real(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    wide = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    makers = {
        "gpt2": ("GPT2LMHeadModel", {}),
        "vit-b-16": ("ViTForImageClassification", {"num_labels": 1000}),
        "resnet50": ("ResNetForImageClassification", {"num_labels": 1000}),
        "llama-8b": ("LlamaForCausalLM", wide | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}),
        "llama-1b": (
            "LlamaForCausalLM",
            wide | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
        ),
    }
    kind, config = makers[name]
    made = getattr(transformers, kind)
    return on_meta(lambda: made(made.config_class(**config)))


def sizes(report: lather.PlanReport) -> Counter[str]:
    """Scalars by what is done with them. Queries, keys and values may be one parameter or three."""
    found = Counter[str]()
    for row in report.params:
        kind = row.rule.removeprefix("kind: ")
        found["matrix" if kind in ("fused", "no rule") else kind] += torch.Size(row.shape).numel()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "vit-b-16", "resnet50", "llama-1b", "llama-8b"])
def test_tables_are_routed_like_the_models_of_transformers(name: str) -> None:
    table, theirs = lather.plan(load(name)), lather.from_adamw(real(name)).plan()
    assert table.memory == theirs.memory
    assert sizes(table) == sizes(theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_with_a_config(tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=4, n_positions=32, tie_word_embeddings=tied)
    kind = transformers.GPT2LMHeadModel
    config.architectures = [kind.__name__]
    config.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert type(model) is kind and all(p.is_meta for p in model.parameters())
    check_bytes(model, kind(config), "from_adamw")
    assert cli.main(["plan", str(tmp_path), "--device", "cpu", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"]["total"] == state_bytes(lather.Shampoo(kind(config)))
    assert {"kind: fused", "kind: position"} <= {row["rule"] for row in planned["params"]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"averaging": "gpa"}, {"ranks": 3, "shard": "fsdp"}])
def test_a_config_says_the_dtype(tmp_path: Path, options: dict[str, Any]) -> None:
    """As models of transformers are loaded. Averages of bfloat16 parameters take more memory, and their gradients travel in it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    real = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    real.save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert isinstance(model, nn.Module) and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in loaded.parameters()]
    assert lather.plan(model, device="cpu", **options).to_dict() == lather.plan(real, **options).to_dict()


@pytest.mark.filterwarnings("ignore")
def test_configs_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(str(tmp_path))
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "architectures": ["OurOwnModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no class OurOwnModel"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be built"):
        load(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        load(str(tmp_path))


# Mistakes.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpt3", "there is no model 'gpt3'; give one of resnet50"),
        ("some_nets", "module:function"),
        ("no_such_module:make", "cannot be imported"),
        ("some_nets:no_such", "cannot be imported"),
        ("some_nets:broken", "no weights here"),
        ("some_nets:wrong", "returned a int"),
        ("w=8x8,w=8", "not a new name"),
        ("w=8xa", "not a shape"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "tune"])
def test_models_that_are_none(folder: Path, command: str, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, text]) == 2
    assert words in capsys.readouterr().err


def test_presets_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "some_nets:Net", "--preset", "from_sgd", "--momentum", "0.9"]) == 0
    assert "sgd" in capsys.readouterr().out
    assert cli.main(["plan", "some_nets:Net", "--preset", "from_sdg"]) == 2
    assert "did you mean 'from_sgd'" in capsys.readouterr().err
