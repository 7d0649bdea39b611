"""Every mixer on the GPU against float64 on the CPU: outputs, gradients and no future leak.

    python scripts/check_on_gpu.py [results.json]

The error of the fused path must be at most twice that of explicit weights in the same type on the same
GPU. Exit status 1 when something fails.
"""

from __future__ import annotations

import json
import sys

import torch

from langevin import attend
from langevin.mixers import Mechanism, build, examples, parse


def views(length: int) -> dict[str, dict]:
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, :7] = False
    documents = (torch.arange(length) // 50).expand(2, -1)
    return {
        "plain": {},
        "left-padded": {"key_padding_mask": real},
        "packed": {"documents": documents},
        "window": {"window": 20},
        "alibi": {"alibi": True},
    }


def outputs_and_gradients(q, k, v, spec, implementation, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, spec, implementation=implementation, **options)
    if "key_padding_mask" in options:  # what comes out at padding is nobody's business
        out = out * options["key_padding_mask"][:, None, :, None]
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    grads = torch.autograd.grad(out, (q, k, v), cotangent.to(out))
    return torch.cat([x.detach().double().cpu().flatten() for x in (out, *grads)])


def main() -> int:
    torch.manual_seed(0)
    rows, failed = [], 0
    specs = [s for s in examples() if "noise" not in s]
    for spec in (s for s in specs if isinstance(parse(s).mixer, Mechanism)):
        for causal in (True, False):
            for view, options in views(200).items():
                if view == "alibi" and not parse(spec).mixer.has_alibi:
                    continue
                on_gpu = {n: x.cuda() if torch.is_tensor(x) else x for n, x in options.items()}
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    q, k, v = (torch.randn(2, h, 200, 64).to(dtype) for h in (4, 2, 2))
                    exact = outputs_and_gradients(
                        *(x.double() for x in (q, k, v)), spec, "reference", causal=causal, **options
                    )
                    gpu = [x.cuda() for x in (q, k, v)]
                    ours, plain = (
                        outputs_and_gradients(*gpu, spec, i, causal=causal, **on_gpu)
                        for i in ("fused", "reference")
                    )
                    scale = float(exact.square().mean().sqrt())
                    errors = [float((x - exact).square().mean().sqrt()) / scale for x in (ours, plain)]
                    good = errors[0] <= max(2 * errors[1], 1e-5)
                    failed += not good
                    rows.append(
                        {
                            "spec": spec,
                            "causal": causal,
                            "view": view,
                            "dtype": str(dtype),
                            "error": errors[0],
                            "plain_error": errors[1],
                            "passed": good,
                        }
                    )
                    if not good:
                        print("FAIL", rows[-1])
    for spec in examples():
        for length in (65, 300):
            module = build(spec, width=128, heads=2, causal=True).cuda().eval()
            x = torch.randn(2, length, 128, device="cuda")
            changed = x.clone()
            changed[:, length // 2] += 1
            half = length // 2
            same = torch.equal(module(x)[:, :half], module(changed)[:, :half])
            failed += not same
            rows.append({"spec": spec, "length": length, "no_future_leak": same, "passed": same})
            if not same:
                print("FAIL", rows[-1])
    print(f"{torch.cuda.get_device_name()}: {len(rows) - failed} passed, {failed} failed")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(rows, file, indent=0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
