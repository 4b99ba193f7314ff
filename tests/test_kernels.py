"""Kernels without a GPU. Their tests run in a process where Triton interprets them, and they are compiled for several GPUs."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from interpreted import ROOT, run_interpreted

import lather
from lather import kernels as facts
from lather import linalg
from lather.compute import kernel_executor, slices
from lather.methods import soap
from lather.roots import directions, products, track
from lather.storage.copies import KernelCopies, Moving
from lather.storage.grids import Grid

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which there is for Linux")


@needs_triton
def test_other_kernels_under_the_interpreter():
    """The executor's are in another file, so that another worker can run them."""
    run_interpreted(
        "test_copies.py",
        "test_directions.py",
        "test_move.py",
        "test_packed.py",
        "test_products.py",
        "test_polar.py",
        "test_track.py",
        "test_travel.py",
    )


def test_no_kernels_are_left_out():
    """Each file of tests/kernels is run by one of the two."""
    asked = {path.name for path in (ROOT / "tests").glob("test_kernels*.py")}
    text = "".join((ROOT / "tests" / name).read_text() for name in asked)
    assert all(f'"{path.name}"' in text for path in (ROOT / "tests/kernels").glob("test_*.py"))


@pytest.mark.parametrize("name", ["copies", "dense", "moments", "packed", "step", "tiles"])
def test_no_kernel_calls_itself(name):
    """Triton 3.4, which torch 2.8 comes with, would follow such a call for ever. Later versions do not."""
    tree = ast.parse((ROOT / "src/lather/kernels" / f"{name}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = {f.name: {ast.unparse(node.func) for node in ast.walk(f) if isinstance(node, ast.Call)} for f in functions}
    assert calls and not [f for f, called in calls.items() if f in called]


# Memory of a program on an H200, an A100, an L4 or RTX 4090, a B200, and an RTX 5090.
GPUS = {90: 232448, 80: 166912, 89: 101376, 100: 232448, 120: 101376}


def stack_of(cubin, folder) -> int:
    """Bytes of a thread's stack. Registers that are spilled there make a kernel several times as slow."""
    import triton

    (folder / "cubin").write_bytes(cubin)
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([program, "--dump-resource-usage", folder / "cubin"], capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


@needs_triton
@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_compile(gpu, monkeypatch, tmp_path):
    """The interpreter takes what the compiler would not, and knows no limits. Nothing is launched, so results mean nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lather.kernels import copies, dense, moments, packed, step

    kinds = {
        torch.float32: "*fp32", torch.float64: "*fp64", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
        torch.uint8: "*u8", torch.bfloat16: "*bf16", torch.bool: "*i1",
    }  # fmt: skip
    seen, loaded_ahead, in_vectors, small = set(), set(), [], gpu != 90  # elsewhere those that need memory are looked at only

    def compile_only(self, *args, grid, warmup, **given):
        seen.add(self.__name__)
        given |= dict(zip(self.arg_names, args, strict=False))
        if small and "num_stages" not in given:
            return
        types, fixed, hints = {}, {}, {}
        for i, p in enumerate(self.params):  # as they are told apart when kernels are launched
            x = given[p.name]
            address = x.data_ptr() if isinstance(x, torch.Tensor) else x
            if p.is_constexpr or x is None or (isinstance(x, int) and x == 1):
                types[p.name], fixed[p.name] = "constexpr", x
                continue
            types[p.name] = kinds[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"
            hints |= {(i,): [["tt.divisibility", 16]]} if isinstance(address, int) and address % 16 == 0 else {}
        options = {name: x for name, x in given.items() if name not in self.arg_names}
        source = ASTSource(self, types, constexprs=fixed, attrs=hints)
        made = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=options)
        assert made.metadata.shared <= GPUS[gpu], self.__name__
        assert stack_of(made.asm["cubin"], tmp_path) <= 256, self.__name__
        in_vectors.extend(["ld.global.v4" in made.asm["ptx"] and "st.global.v4" in made.asm["ptx"]] if "VECTOR" in given else ())
        loaded_ahead.update({self.__name__} if "cp.async" in made.asm["ptx"] else ())

    suits, memory = slices.suits, SimpleNamespace(shared_memory_per_block_optin=GPUS[gpu])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(gpu, 10))
    for module, name in ((kernel_executor, "stages"), (products, "stages"), (kernel_executor, "registers")):
        limit = getattr(facts, name).__wrapped__(torch.device("cuda"))
        monkeypatch.setattr(module, name, lambda device, limit=limit: limit)
    monkeypatch.setattr(slices, "suits", lambda device, *rest: suits("cuda", *rest))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    models = (
        ([(256, 128), (9,)], {"momentum": 0.5, "root": "eigh"}),
        ([(256, 128)], {"factors": "packed", "filter_dtype": "bfloat16", "root": "eigh"}),
        ([(8, 8, 3)], {"merge_dims": False, "root": "eigh"}),
        ([(8, 16)], {"preconditioner": "spectral", "graft": None}),
        ([(256, 128)], {"preconditioner": "soap", "graft": None, "root": "eigh"}),
    )
    monkeypatch.setattr(soap, "has_kernels", lambda device: True)
    for shapes, options in models[: 2 if small else len(models)]:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        monkeypatch.setattr(kernel_executor, "are_products_exact", lambda given=options: "factors" not in given)
        opt = lather.Shampoo(params, precondition_frequency=1, **options)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    x, one = torch.ones(1, 256, 256), torch.ones(1)
    m, r, _, starts, _ = products.begin(x, one, 1e-4, 1.02, (1.0, 1.0, 1.0, 0.0), 2)
    halves = products.product(r, m, add=m, beta=0.5)
    products.residual(halves, x, starts, 2)
    products.decode(halves, one, 256)
    for shape in ((128, 256), (256, 128), (64, 64)):
        single = products.unit_halves(torch.ones(1, *shape), 0.0)
        products.symmetric(single.mT if shape == (256, 128) else single)
    products.symmetric(single, single, 0.5, single, 0.5, 0.5)
    assert {"gram", "symmetric"} <= loaded_ahead  # or what they take would say nothing
    if small:
        return
    monkeypatch.setattr(linalg, "packs_by_kernels", lambda d, device: True)
    for dtype, d in ((torch.float32, 256), (torch.bfloat16, 33)):
        linalg.unpack(linalg.pack(torch.ones(1, d, d)).to(dtype), torch.float32)
    for shape in ((256, 128), (16, 8)):
        u, whole = torch.ones(2, *shape), [torch.ones(2, d, d) for d in shape]
        for given in (whole, [linalg.pack(x) for x in whole]):
            assert directions.fits(u, given)
            directions.precondition(u, given, torch.empty_like(u), directions.Sizes(torch.ones(2), torch.ones(2)))
    monkeypatch.setattr(track, "has_kernels", lambda device: True)
    for d in (256, 40, 65):  # with a last tile that is whole, of half the width, and of one column
        track.cholesky(torch.ones(1, d, d))
        track.take_columns(torch.ones(1, d, d), torch.zeros(1, d, dtype=torch.int64))
    soap.turn_(torch.ones(1, 64, 64), {i: torch.ones(1, 64, 64) for i in range(2)}, torch.ones(1, dtype=torch.bool))
    for own, other in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.int8)):
        flat, grids = torch.zeros(999, dtype=own), [Grid(0, 0, (0,), (512,)), Grid(0, 513, (0,), (1,))]
        for into in (True, False)[: 2 if other.is_floating_point else 1]:
            KernelCopies(grids, flat, [0], into_flat=into).run({0: torch.zeros(512, dtype=other)})
    moving, to = Moving(1.0, 0.1, 0.9, 1.0, True), {0: torch.zeros(512)}
    KernelCopies(grids, torch.zeros(999), [0], into_flat=False).move(to, {0: torch.zeros(512)}, moving)
    assert in_vectors == 6 * [True, False]
    assert seen == {
        name
        for module in (copies, dense, moments, packed, step)
        for name, x in vars(module).items()
        if isinstance(x, triton.runtime.JITFunction) and x.__module__ == module.__name__ and name[0] != "_"
    }
