"""The paper's claim in seconds: at a rate near the edge plain GRPO gives up its right responses, with LLDS it keeps them."""
import dataclasses

import pytest
import torch

import llds_grpo as L


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                                     # another number rounds differently and makes another run
    yield
    torch.set_num_threads(threads)


def likelihood_after_15_steps(llds_lambda):
    """Nats per token of the initial policy's right responses, mean of steps 10 to 14, in a small and hasty run of the tiny world."""
    cfg = dataclasses.replace(L.TINY, questions_per_step=8, updates_per_rollout=8, lr=1e-3, warmup_steps=10, llds_lambda=llds_lambda, seed=40, chat="no")
    device, tokenizer = torch.device("cpu"), L.load_tokenizer(cfg.model)
    policy, reference = L.load_policy(cfg.model, device), L.load_policy(cfg.model, device, trainable=False)
    optimizer, generator = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, fused=True), torch.Generator().manual_seed(cfg.seed)
    task, probe = L.load_task(cfg), []
    rows = [L.train_step(step, policy, reference, tokenizer, optimizer, generator, probe, *task, cfg) for step in range(15)]
    return sum(row["logp_probe"] for row in rows[10:]) / 5


def test_llds_keeps_what_grpo_loses(one_thread):
    # with LLDS -0.08; -1.37 without it, -0.44 with its gate inverted, -6.6 with feedback trained as if the policy had written it
    assert likelihood_after_15_steps(0.2) > -0.2
    assert likelihood_after_15_steps(0.0) < -0.5
