"""The Triton kernel beside PyTorch's backends: is it right, and how fast is it?

    python -m tests.bench.flash [--json FILE] [--compile]

On an NVIDIA GPU: first the kernel against attention in float64, for all dtypes and ragged, grouped shapes, forward and
backward; then times for D = 64 and 128, T = 512 ... 16384, causal and not, multi-head and grouped, beside each backend
of `F.scaled_dot_product_attention` by its name. Prints a table, and writes a JSON file. About two minutes.

Without a GPU only small shapes are compared, in Triton's interpreter. `--compile` needs no GPU either: it compiles the
kernels for an H100, and says how many registers and how much shared memory they take.
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

if "--compile" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tfmlib import flash_triton, kernels

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
N_TOKENS, WIDTH = 16_384, 2048  # in all rows together, and of all heads: the sizes of the FlashAttention papers
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
LONGEST_MATH = 4096  # it holds all scores

# Right? ---------------------------------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CASES = [  # B, H, K, T, S, D, causal
    (2, 4, 4, 64, 64, 64, True),
    (1, 2, 1, 65, 65, 32, True),
    (2, 6, 2, 37, 53, 16, True),
    (1, 4, 2, 53, 37, 64, True),
    (1, 3, 3, 1, 77, 128, True),
    (2, 4, 1, 50, 19, 32, False),
]
LARGE_CASES = [  # on a GPU
    (2, 8, 8, 1024, 1024, 64, True),
    (2, 8, 2, 1000, 1777, 128, True),
    (1, 16, 4, 2049, 2049, 64, False),
    (1, 4, 4, 3001, 513, 128, True),
]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention in float64, with all scores."""
    group, (T, S) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if not causal:
        return scores.softmax(-1) @ v
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    blind = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(~seen & ~blind, -math.inf).softmax(-1).masked_fill(blind, 0.0) @ v


def errors(case: tuple, dtype: torch.dtype, device: str) -> dict[str, float]:
    """How far the kernel's out, dq, dk and dv are from float64, as a share of the largest entry, or of 0.1."""
    B, H, K, T, S, D, causal = case
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((B, T, H, D), (B, S, K, D), (B, S, K, D), (B, T, H, D))  # tokens before heads: not contiguous
    made = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    *inputs, grad = (x.transpose(1, 2) for x in made)
    results = []
    for function, kind in ((flash_triton.flash_attention_triton, dtype), (exact, torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
        out = function(*leaves, causal)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))])
    names = ("out", "dq", "dk", "dv")
    return {
        name: float((got.double() - want).abs().max() / want.abs().max().clamp(min=0.1))
        for name, got, want in zip(names, *results, strict=True)
    }


def correctness(device: str) -> Iterator[tuple[tuple, torch.dtype, dict[str, float]]]:
    """Every case in every dtype, with its errors. Raises AssertionError for the first that is too large."""
    for case in CASES + (LARGE_CASES if device == "cuda" else []):
        for dtype, limit in TOLERANCE.items():
            found = errors(case, dtype, device)
            assert max(found.values()) <= limit, f"{case} in {dtype}: {found}, allowed {limit}"
            yield case, dtype, found


# Fast? ----------------------------------------------------------------------------------------------------------------


def attention_flops(B: int, H: int, T: int, D: int, causal: bool, backward: bool) -> float:
    """As the papers count: two matrix products forward, five backward, and half of each where the future is hidden."""
    return 4 * B * H * T * T * D * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)


def run(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by the named kernel."""
    if kernel == "tfmlib":
        return flash_triton.flash_attention_triton(q, k, v, causal)
    with sdpa_kernel(BACKENDS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def timed(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, backward: bool) -> float | None:
    """The median milliseconds, or None where the backend does not do this case, or has no memory for it."""
    call: Callable = partial(run, kernel, q, k, v, causal)
    try:
        if backward:
            out = call()
            call = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        return kernels.triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median")
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:
        if "No available kernel" in str(error) or "not supported" in str(error) or "No viable backend" in str(error):
            return None
        raise


def measurements() -> Iterator[dict]:
    """A row for each pass, width, length, mask, number of key/value heads, and kernel."""
    for D in (64, 128):
        for T in LENGTHS:
            for causal in (True, False):
                for group in (1, 4):
                    B, H = N_TOKENS // T, WIDTH // D
                    K = H // group
                    q, k, v = (
                        torch.randn(B, heads, T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                        for heads in (H, K, K)
                    )
                    for backward in (False, True):
                        for kernel in ("tfmlib", *BACKENDS):
                            if kernel == "math" and T > LONGEST_MATH:
                                continue
                            milliseconds = timed(kernel, q, k, v, causal, backward)
                            if milliseconds is None:
                                continue
                            flops = attention_flops(B, H, T, D, causal, backward)
                            yield {
                                "pass": "backward" if backward else "forward",
                                "D": D,
                                "T": T,
                                "B": B,
                                "H": H,
                                "K": K,
                                "causal": causal,
                                "kernel": kernel,
                                "milliseconds": round(milliseconds, 4),
                                "tflops": round(flops / milliseconds / 1e9, 1),
                            }


def machine() -> dict[str, str]:
    """Which device and which software."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0],
        "torch": torch.__version__,
        "triton": kernels.triton.__version__,
        "cuda": torch.version.cuda,
        "dtype": "bfloat16",
    }


def as_table(rows: list[dict]) -> str:
    """TFLOP/s of every kernel side by side, and the kernel's speed as a ratio to PyTorch's flash backend."""
    names = ["tfmlib", *BACKENDS]
    lines = [
        f"| pass | D | T | heads | causal | {' | '.join(names)} | tfmlib / flash |",
        "|---" * (len(names) + 6) + "|",
    ]
    table: dict[tuple, dict[str, float]] = {}
    for row in rows:
        case = row["pass"], row["D"], row["T"], f"{row['H']}/{row['K']}", "yes" if row["causal"] else "no"
        table.setdefault(case, {})[row["kernel"]] = row["tflops"]
    for case, speeds in sorted(table.items()):
        ratio = f"{speeds['tfmlib'] / speeds['flash']:.2f}" if {"tfmlib", "flash"} <= speeds.keys() else ""
        cells = [f"{speeds[name]:.0f}" if name in speeds else "" for name in names]
        lines.append(f"| {' | '.join(map(str, case))} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


# Compiled without a GPU -----------------------------------------------------------------------------------------------


def compiled(kernel, D: int, dtype: torch.dtype, blocks: dict[str, int], options: dict[str, int], arch: int = 90):
    """A kernel as it is compiled for a GPU of compute capability arch / 10: causal, contiguous tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointer = "*" + {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    constants = {"D": D, "causal": True, **blocks}
    signature, values, hints = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif name.endswith("_strides"):
            signature[name], values[i, 3] = ("i32", "i32", "i32", "constexpr"), 1
            hints |= {(i, axis): [["tt.divisibility", 16]] for axis in range(3)}
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("lse_ptr", "delta_ptr") else pointer
            hints[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(kernel, signature, values, hints)
    return kernels.triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(program) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and shared memory of a compiled kernel."""
    tool = Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    words = dict(word.split(":", 1) for word in said.split() if word.count(":") == 1)
    return {"registers": int(words["REG"]), "spilled": int(words["STACK"]), "shared": program.metadata.shared}


def compilations(
    dtypes=tuple(TOLERANCE), widths=kernels.WIDTHS
) -> Iterator[tuple[str, torch.dtype, int, dict[str, int]]]:
    """Every kernel for every dtype and width, as `launch` would compile it on an H100."""
    for dtype in dtypes:
        for D in widths:
            block_q, block_k, options = kernels.blocks_for(dtype, D)
            blocks = {"BLOCK_Q": block_q, "BLOCK_K": block_k}
            yield "forward", dtype, D, resources(compiled(flash_triton.flash_kernel, D, dtype, blocks, options))
            block, options = kernels.backward_block(dtype, D)
            for name, kernel in (("dq", kernels._dq_kernel), ("dk, dv", kernels._dkdv_kernel)):
                yield name, dtype, D, resources(compiled(kernel, D, dtype, {"BLOCK": block}, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--compile", action="store_true", help="compile for an H100; no GPU needed")
    options = parser.parse_args()
    if kernels.RUNS_ON == "missing":
        sys.exit("Triton is not installed: nothing to measure")
    if options.compile:
        print("| kernel | dtype | D | registers | spilled bytes | shared bytes |\n|---|---|---|---|---|---|")
        for name, dtype, D, used in compilations():
            print(
                f"| {name} | {dtype} | {D} | {used['registers']} | {used['spilled']} | {used['shared']:,} |", flush=True
            )
        return
    device = "cuda" if kernels.RUNS_ON == "GPU" else "cpu"
    for case, dtype, found in correctness(device):
        worst = max(found.values())
        print(f"right: (B, H, K, T, S, D, causal) = {case} in {dtype}, largest error {worst:.1e}", flush=True)
    if device == "cpu":
        print("no GPU: nothing timed")
        return
    found = {**machine(), "rows": []}
    print(", ".join(f"{key} {value}" for key, value in found.items() if key != "rows"), flush=True)
    for row in measurements():
        found["rows"].append(row)
        if options.json:  # after every row, so that a run that is cut short leaves what it has
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(as_table(found["rows"]))


if __name__ == "__main__":
    main()
