"""Memory at a model's real size, from the shapes; on a CUDA device also measured, with speed. Nothing is downloaded. Not a test.

    python tests/bench_gpu.py            Qwen2.5-0.5B at the default settings and at the paper's lengths: computed, and measured on a GPU
    python tests/bench_gpu.py --check    the formula in float32 against a measured training step of smaller models on the CPU
"""
import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llds_grpo as L                                                                                       # noqa: E402

QWEN = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
SMALL = {"wide": dict(vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2),
         "deep": dict(vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=4)}


def make(shape):
    return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None))


def memory(shape, parameters, tokens, action_tokens, half, checkpointing=False, reference=True) -> dict:
    """Bytes of a training step. half: bf16 autocast (GPU), else float32 (CPU).

    Kept for the backward pass, per token and layer: two norms (input, normalised, output: 3 H each, float32), query and
    attention output in two layouts (3 H), key and value (2 Hkv), gate, up, silu(gate) and their product (4 I); with bf16 the
    inputs of the linear layers once more (2 H). The head keeps logits, their float32 copy and log-probabilities.
    """
    H, I, V = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    Hkv = H // shape["num_attention_heads"] * shape["num_key_value_heads"]
    b = 2 if half else 4
    layer = tokens * (4 * 6 * H + b * (3 * H + 2 * Hkv + 4 * I) + (2 * 2 * H if half else 0))
    pieces = min(action_tokens, max(1, 2 ** 27 // V))                 # tokens whose logits are alive at once
    layers = shape["num_hidden_layers"]
    return {"weights": 4 * parameters, "gradients": 4 * parameters, "AdamW": 8 * parameters, "reference": 4 * parameters * reference,
            "bf16 copies": 2 * parameters * half, "activations": layers * tokens * 4 * H + layer if checkpointing else layers * layer,
            "logits": pieces * V * (2 * half + 4 * 3)}


def batch_of(shape, rows, length):
    ids = torch.randint(0, shape["vocab_size"], (rows, length))
    action_ids = (torch.arange(length - 1) % 64 >= 32).long().expand(rows, -1).contiguous()          # half of the tokens
    zeros = torch.zeros(rows, length - 1)
    return {"input_ids": ids, "action_ids": action_ids, "answer_mask": zeros.bool(), "advantages": torch.tensor([1.0, -1.0] * (rows // 2)),
            "old_logps": zeros, "ref_logps": zeros, "microbatches": [torch.arange(rows)]}


def check_side(name):
    """In a process of its own: the peak of resident memory that one training step adds to the bare model."""
    shape, rows, length = SMALL[name], 8, 513
    torch.set_num_threads(1)
    model = make(shape)
    batch = batch_of(shape, rows, length)
    with torch.no_grad():                                             # loads what the libraries load late
        L.token_logps(model, batch["input_ids"][:, :9], batch["action_ids"][:, :8])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cfg = dataclasses.replace(L.Config(), group_size=rows, updates_per_rollout=1, llds_lambda=0.2)
    L.update(model, optimizer, batch, cfg, 1.0)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    parts = memory(shape, model.num_parameters(), rows * (length - 1), int((batch["action_ids"] > 0).sum()), half=False, reference=False)
    print(json.dumps({"measured": peak, "activations": parts["activations"], "logits": parts["logits"], "gradients": parts["gradients"]}))


def check():
    worst = 0.0
    for name in SMALL:
        out = subprocess.run([sys.executable, __file__, "--side", name], capture_output=True, text=True, check=True).stdout
        row = json.loads(out.splitlines()[-1])
        computed = row["activations"] + row["logits"]                 # the peak is at the end of the forward pass
        worst = max(worst, abs(computed / row["measured"] - 1))
        print(f"{name}: computed {computed / 2 ** 20:.0f} MiB, measured {row['measured'] / 2 ** 20:.0f} MiB, ratio {computed / row['measured']:.2f}")
    return worst < 0.15


def main():
    policy_parameters = 494_032_768
    device = torch.device("cuda") if torch.cuda.is_available() else None
    for name, length, changes in (("default settings, 1,024 tokens a row", 1024, {}), ("4,096 tokens a row", 4096, {}),
                                  ("4,096 tokens a row, checkpointing", 4096, {"gradient_checkpointing": True})):
        cfg = dataclasses.replace(L.Config(), questions_per_step=16, updates_per_rollout=2, **changes)
        tokens = max(cfg.microbatch_tokens, length)
        parts = memory(QWEN, policy_parameters, tokens, tokens // 2, half=True, checkpointing=cfg.gradient_checkpointing)
        print(f"{name}: computed {sum(parts.values()) / 2 ** 30:.1f} GiB: " + ", ".join(f"{k} {v / 2 ** 30:.1f}" for k, v in parts.items()))
        cache = cfg.rollout_batch * length * 2 * 24 * 2 * 128 / 2 ** 30
        print(f"    key-value cache of {cfg.rollout_batch} rows in the rollout: {cache:.1f} GiB")
        if device:
            measure(name, cfg, length, device)


def measure(name, cfg, length, device):
    """Log-probabilities and updates of random rows on the GPU: tokens a second and the peak."""
    policy, reference = make(QWEN).to(device), make(QWEN).to(device).requires_grad_(False)
    if cfg.gradient_checkpointing:
        policy.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    torch.cuda.reset_peak_memory_stats()
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch_of(QWEN, cfg.group_size * 16, length + 1).items()}
    batch["microbatches"] = [torch.tensor(rows, device=device) for rows in L.microbatches([length] * len(batch["input_ids"]), cfg.microbatch_tokens)]
    start = time.perf_counter()
    batch["old_logps"], _ = L.minibatch_logps(policy, batch, with_entropy=True)
    batch["ref_logps"], _ = L.minibatch_logps(reference, batch)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    L.update(policy, optimizer, batch, cfg, 1.0)
    torch.cuda.synchronize()
    done, tokens = time.perf_counter(), batch["input_ids"].numel()
    print(f"    measured: peak {torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB, log-probabilities (old and reference) {tokens / (middle - start):.0f} "
          f"tokens/s, update {tokens / (done - middle):.0f} tokens/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        check_side(args.side)
    else:
        sys.exit(not check() if args.check else main())
