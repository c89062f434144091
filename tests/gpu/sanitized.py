"""Every compiled CUDA kernel once on small, ragged operands, for compute-sanitizer.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitized.py` allocates every
tensor separately, so that an access beyond its end is noticed.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from fastsam import fed
from fastsam_kernels import native

sys.path.append(str(Path(__file__).resolve().parents[2]))
from tests.helpers.gpu_step import DEVICE, Step, hparams_of

LAYOUTS = {
    "ragged": [33, 0, 4097, 5, 1],
    "several sweeps and blocks": [70_001, 3],
    "large table": [1 + i % 9 for i in range(80)],
}


def every_op(kernels: Any, step: Step, shift: int) -> torch.Tensor:
    """Call all ops on the operands of `step` and return Adam's counts of steps, one each.

    With `shift`, gradients are not aligned.
    """
    device = step.sumsq.device
    rows, table, hparams = step.sumsq.numel(), step.table, step.hparams
    grads = step.g2
    if shift:
        grads = [torch.cat([g.flatten()[:shift], g.flatten()])[shift:].view(g.shape) for g in grads]
    adaptive = hparams_of(
        rows, str(device), ADAPTIVE=1.0, ETA=0.01, CLIP=1.0, CLIP_INCLUDES_PROX=1.0, PROX_MU=0.1, G1_COEF=0.5
    )
    first, second, q = (torch.zeros_like(step.momentum) for _ in range(3))
    steps = torch.zeros(rows, len(table), device=device)
    kernels.norm_(step.sumsq, grads, [], table, hparams)
    kernels.norm_(step.sumsq, grads, step.params, table, adaptive, accumulate=True)
    kernels.perturb_(step.params, step.backup, grads, table, adaptive, step.sumsq, True)
    kernels.perturb_(step.params, step.backup, grads, table, hparams, step.sumsq, False)
    kernels.update_norm_(step.sumsq, step.params, step.backup, grads, table, adaptive, g1=step.g1, q=q)
    kernels.update_(step.params, step.backup, grads, table, hparams, "sgd", [step.momentum], init_state=True)
    options = {"g1": step.g1, "q": q, "sumsq_v": step.sumsq, "write_master": True}
    kernels.update_(step.params, step.backup, grads, table, adaptive, "sgd", [step.momentum], **options)
    adam = hparams_of(rows, str(device), BETA1=0.9, BETA2=0.99, EPS=1e-8)
    for found_inf in (0.0, 1.0):
        options = {"steps": steps, "found_inf": torch.full((1,), found_inf, device=device)}
        kernels.update_(step.params, step.backup, grads, table, adam, "adam", [first, second], **options)
    federated_ops(kernels, step, grads, adaptive, q)
    kernels.restore_(step.params, step.backup, table)
    return steps


def federated_ops(kernels: Any, step: Step, grads: list[torch.Tensor], hparams: torch.Tensor, q: torch.Tensor) -> None:
    """Call the ops of federated training, and its variants of the other ops."""
    rows, table, device = step.sumsq.numel(), step.table, step.sumsq.device
    mu, s, eps = (torch.zeros_like(step.momentum) for _ in range(3))
    kernels.dual_norm_(step.sumsq, grads, mu, s, table, hparams)
    kernels.dual_perturb_(step.params, step.backup, mu, grads, s, table, hparams, step.sumsq, eps=eps)
    kernels.inner_(torch.zeros(rows, 2, dtype=torch.float64, device=device), grads, step.g1, table)
    kernels.update_(step.params, step.backup, grads, table, hparams, "sgd", q=q, shift=eps)
    if step.params[0].element_size() == 2:
        seed = torch.arange(rows, device=device)
        kernels.perturb_(step.params, step.backup, grads, table, hparams, step.sumsq, True, seed=seed)
    elif rows > 1:
        high, low = (torch.zeros_like(step.backup[0], dtype=torch.int64) for _ in range(2))
        kernels.accumulate_(high, low, step.backup, 0.5)
        largest, base = torch.zeros(rows, dtype=torch.float64, device=device), step.backup[0, 1:]
        kernels.accumulate_(high[1:], low[1:], step.backup[:, 1:], -0.5, base=base, largest_=largest)


def row_programs() -> None:
    """Run passes and epochs of dense clients, with partial batches and ignored labels."""
    clients = [(torch.randn(n, 64), torch.randint(10, (n,))) for n in (20, 20, 7)]
    clients[0][1][3] = -100
    for hidden_size in (32, 128):
        model = torch.nn.Sequential(torch.nn.Linear(64, hidden_size), torch.nn.ReLU(), torch.nn.Linear(hidden_size, 10))
        options: dict[str, Any] = {"rounds": 3, "batch_size": 16, "participation": 1.0}
        for optimizer in ({"momentum": 0.5, "clip_norm": 1.0}, {"optimizer": "AdamW"}):
            fed.run(model, clients, fed.FedSAM(), executor="vmap", device=DEVICE, **optimizer, **options)


def main() -> int:
    reason = native.why_not("cuda")
    if reason is not None:
        print(f"native on CUDA: {reason}", file=sys.stderr)
        return 1
    for name, lengths in LAYOUTS.items():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for rows, shift in ((1, 0), (2, 1)):
                step = Step(lengths, rows, dtype=dtype, master=rows == 2)
                steps = every_op(native, step, shift)
                torch.cuda.synchronize()
                assert (steps == 1).all() and all(p.isfinite().all() for p in step.params)
        print(f"{name}: done", flush=True)
    row_programs()
    print("row programs: done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
