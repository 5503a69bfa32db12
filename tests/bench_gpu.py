"""Speed and peak memory on one CUDA device at a model's real size, with random weights: nothing is downloaded. Not a test.

    python tests/bench_gpu.py            Qwen2.5-0.5B's shape at the default settings, then at 4,096 tokens in all
    python tests/bench_gpu.py --smoke    a tiny shape on any device, to check the script itself
"""
import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llds_grpo as L                                                                                       # noqa: E402


def trajectories(cfg, length, vocab, generator):
    """Random responses of `length` tokens: a prompt, then actions and feedback in turn, half of the tokens each."""
    rows = []
    for i in range(cfg.group_size * cfg.questions_per_step):
        ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
        turn = (length - 120) // (2 * cfg.max_turns) or 1
        actions = [0] * 120 + [(k // turn // 2 + 1) * (k // turn % 2 == 0) for k in range(length - 120)]
        rows.append(L.Trajectory({"question": ""}, ids, actions[:length], [False] * length, [{}] * cfg.max_turns, reward=float(i % 2)))
    return rows


def main(smoke):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = dict(vocab_size=600, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2) if smoke else \
        dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None)
    policy, reference = Qwen2ForCausalLM(config).to(device), Qwen2ForCausalLM(config).to(device).requires_grad_(False)
    tokenizer = L.load_tokenizer(L.TINY.model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=device.type == "cuda")
    questions, retriever = L.load_task(L.TINY)
    generator = torch.Generator(device).manual_seed(0)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, {policy.num_parameters():,} parameters, torch {torch.__version__}")
    for name, length, changes in (("default settings, 1,024 tokens", 1024, {}), ("4,096 tokens", 4096, {}), ("4,096 tokens, checkpointing", 4096, {"gradient_checkpointing": True})):
        cfg = dataclasses.replace(L.Config(), prompt="Question: {question}\n", chat="no", questions_per_step=4 if smoke else 16, updates_per_rollout=2, **changes)
        if smoke:
            length, cfg.max_action_tokens, cfg.microbatch_tokens = 256, 16, 1024
        if cfg.gradient_checkpointing:
            policy.gradient_checkpointing_enable()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        asked = [q for q in questions[:cfg.questions_per_step] for _ in range(cfg.group_size)][:cfg.rollout_batch]
        with L.autocast(device):
            rows = L.rollout(policy.eval(), tokenizer, asked, retriever, dataclasses.replace(cfg, max_action_tokens=16 if smoke else 128), generator)
        sampled = sum(a > 0 for t in rows for a in t.action_ids)
        rolled = time.perf_counter()
        peaks = [torch.cuda.max_memory_allocated() / 2 ** 30 if device.type == "cuda" else float("nan")]
        batches = L.make_minibatches(trajectories(cfg, length, shape["vocab_size"], torch.Generator().manual_seed(0)), cfg, device)
        for batch in batches:
            batch["old_logps"], batch["entropy"] = L.minibatch_logps(policy, batch, with_entropy=True)
            batch["ref_logps"], _ = L.minibatch_logps(reference, batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        old = time.perf_counter()
        for batch in batches:
            L.update(policy, optimizer, batch, cfg, 1.0)
        if device.type == "cuda":
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() / 2 ** 30)
        done, tokens = time.perf_counter(), cfg.group_size * cfg.questions_per_step * length
        print(f"{name}: rollout {sampled / (rolled - start):.0f} sampled tokens/s; log-probabilities (old and reference) {tokens / (old - rolled):.0f} tokens/s; "
              f"update {tokens / (done - old):.0f} tokens/s; peak GiB in rollout {peaks[0]:.1f}, in all {peaks[-1]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    main(parser.parse_args().smoke)
