"""The command ``lather plan``: every option, many ranks, and mistakes in plain words."""

from __future__ import annotations

import json
import math

import pytest

import lather
from lather import cli
from lather.report import models


@pytest.mark.parametrize("shard", ["ddp", "fsdp", "hsdp=2", "tp=2"])
def test_the_command_line_plans_for_many_ranks(shard, capsys):
    arguments = ["plan", "gpt2-tiny", "--ranks", "2,4", "--shard", shard]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in rows] == [2, 4]
    for row in rows:
        law = (4 * models.num_params(models.shapes_of(models.load("gpt2-tiny"))) / row["ranks"]) * 4
        assert row["law_bytes"] > law
        assert f"{row['imbalance']:.3f}" in table
    assert "(4P/N + P) C(N)" in table


def test_groups_repeat_the_work(capsys):
    assert cli.main(["plan", "gpt2-tiny", "--ranks", "8", "--group", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["trainers"] == 2


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--root", "track", "--refresh-delay", "2"], {"root": "track", "refresh_delay": 2}),
        (["--root", "newton(iterations=9)", "--root-device=cpu"], {"root": "newton(iterations=9)", "root_device": "cpu"}),
        (["--factors", "packed", "--root-dtype", "bfloat16"], {"factors": "packed", "root_dtype": "bfloat16"}),
        (["--max-preconditioner-dim", "inf", "--graft", "none"], {"max_preconditioner_dim": math.inf, "graft": None}),
        (["--betas", "0.0,0.9", "--merge-dims", "false"], {"betas": (0.0, 0.9), "merge_dims": False}),
    ],
)
def test_the_command_line_has_every_option(arguments, options, capsys):
    assert cli.main(["plan", "w=64x32,c=8x4x3x3", *arguments, "--json"]) == 0
    report = lather.plan({"w": (64, 32), "c": (8, 4, 3, 3)}, device="cuda", **options)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2-tiny", "--ranks", "4", "--shard", "zero"], "shard='zero' is not valid"),
        (["gpt2-tiny", "--ranks", "4", "--shard", "hsdp=3"], "does not divide 4 ranks"),
        (["gpt2-tiny", "--ranks", "4", "--group", "3"], "does not divide the 4 ranks"),
        (["gpt2-tiny", "--ranks", "4", "--shard", "fsdp", "--group", "2"], "do not store the whole"),
        (["gpt2-tiny", "--communication-dtype", "int4"], "communication_dtype='int4'"),
        (["gpt2-tiny", "--root", "nwton"], "did you mean 'newton'?"),
        (["gpt2-tiny", "--refresh-delay", "10"], "must be less than precondition_frequency=10"),
        (["gpt2-tiny", "--precondition-frequency", "0"], "precondition_frequency=0 is not valid"),
        (["gpt2-tiny", "--betas", "0.9"], "a pair (beta1, beta2)"),
        (["gpt2-tiny", "--rooot", "eigh"], "unknown argument '--rooot'; did you mean --root?"),
        (["gpt2-tiny", "--block-size", "64"], "unknown argument '--block-size'; did you mean --max-preconditioner-dim?"),
        (["gpt2-tiny", "--precondition-freqency=5"], "did you mean --precondition-frequency?"),
        (["gpt2-tiny", "--colour", "red"], "unknown argument '--colour'; --help"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, message, capsys):
    assert cli.main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--device", "foo"], ["--dtype", "foo"], ["--dtype", "int8"], ["--exponent", "{1: 2, 'a': 3}"]])
def test_what_makes_no_sense_is_refused_without_a_traceback(given, capsys):
    assert cli.main(["plan", "w=8x8", *given]) == 2
    assert given[0].strip("-") in capsys.readouterr().err


DEEP = "(" * 5000 + ")" * 5000
TOO_MUCH = [
    (["plan", "gpt2", "--split", "1000000000"], "split=1000000000 does not fit"),
    (["plan", "w=0x5", "--split", "1000000000"], "at most 1,048,576"),
    (["plan", "gpt2", "--ranks", "100000000"], "at most 16384 ranks"),
    (["plan", "w=1000000000x1000000000"], "at most 1,048,576"),
    (["plan", "w=10000000000x10000000000"], "torch has no tensor of such a shape"),
    (["plan", f"w={'9' * 5000}"], "is not a shape"),
    (["plan", "gpt2", "--max-preconditioner-dim", "1"], "at most 1,048,576"),
    (["plan", "w=1000000000x4x4", "--batch-dims", "1"], "at most 1,048,576"),
    (["plan", "w=8x8", "--ranks", "8", "--shard", f"tp={'9' * 5000}"], "does not divide 8 ranks"),
    (["plan", "w=8x8", "--precondition-frequency", "1" + "0" * 400], "up to 9223372036854775807"),
    (["plan", "w=8x8", "--lr", "1" + "0" * 400], "at least 0 and finite"),
    (["plan", "w=8x8", "--root", DEEP], "cannot be read"),
    (["plan", "w=8x8", "--root", "newton(iterations=99999999999)"], "at most 1000"),
    (["plan", "w=8x8", "--root", "minimax(relative_eps=1e-300)"], "at least 1e-16"),
    (["plan", "w=8x8", "--betas", "{[]: 1}"], "a pair (beta1, beta2)"),
    (["plan", "w" * 5000], "there is no model"),
    (["tune", "w=1000000000x1000000"], "at most 1,048,576"),
    (["tune", "w=10000000x100000", "--large-dim", "diagonal"], "do not fit on"),
    (["tune", "w=8x8", "--memory", "0.5"], "memory='0.5' is not a size"),
    (["tune", "w=8x8", "--memory", "1" + "0" * 400], "is not a size"),
    (["tune", "w=8x8", "--seconds", "nan"], "seconds=nan"),
]


@pytest.mark.parametrize(("arguments", "message"), TOO_MUCH, ids=lambda x: str(x)[:60])
def test_what_would_take_for_ever_is_refused_at_once(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", [",".join(["8"] * 33), "9" * 30, "9" * 5000], ids=lambda x: str(len(x)))
def test_too_many_ranks_are_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "w=8x8", "--ranks", text])
    assert "at most" in capsys.readouterr().err


def test_long_periods_and_many_ranks_are_planned_at_once():
    staggered = {"refresh": "staggered", "precondition_frequency": 10**15}
    assert lather.plan({"w": (8, 8), "v": (8, 4)}, **staggered).state_bytes
    report = lather.plan({"w": (8, 8)}, ranks=10**9, num_trainers_per_group=4)
    assert report.teams[0].trainers == 4


@pytest.mark.parametrize("command", [[], ["plan"], ["demo"], ["view"], ["options"]])
def test_help_is_plain_text(command, capsys):
    """Options are described in Markdown, for docs/options.md. The command line takes it out."""
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    text = capsys.readouterr().out
    assert "`" not in text and "](" not in text and "†" not in text
    if command == ["plan"]:
        assert "docs/algorithm.md" in text and "docs/algorithm.md#averaging" in text.replace("\n", "").replace(" ", "")
