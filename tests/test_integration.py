"""The README's own code and the recipes that it links to, run against TRL and verl where they are installed, and compared with llds_loss."""
import importlib
import re
from pathlib import Path

import pytest
import torch

import eval as E
import llds_grpo as L
from worlds import bpe_tokenizer, tiny_model

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def recipe(name):
    """tests/NAME as a module; the README links to it and quotes lines of it."""
    code = Path(__file__).with_name(name).read_text(encoding="utf-8")
    assert f"](tests/{name})" in README and len(code.strip().splitlines()) <= 50
    return importlib.import_module(name[:-3])


def test_the_readme_quotes_the_recipes():
    for block in re.findall(r"```python\n# of tests/(\w+\.py)\n(.*?)```", README, re.S):
        code = Path(__file__).with_name(block[0]).read_text(encoding="utf-8")
        assert block[1] in code
    assert README.count("# of tests/") == 2


def test_the_one_line_of_the_readme_runs():
    line = re.search(r"```python\n(loss = .*?)\s*#.*\n```", README).group(1)
    space = {"loss": 0.0, "llds_loss": L.llds_loss, "logps": torch.full((1, 2), -2.0), "old_logps": torch.full((1, 2), -1.0),
             "advantages": torch.tensor([1.0]), "action_ids": torch.tensor([[1, 1]])}
    exec(line, space)
    assert abs(space["loss"].item() - 0.2) < 1e-6


def test_readme_names_real_things():
    options = set(re.findall(r"--([a-z][a-z-]+)", README))
    known = set(re.findall(r"--([a-z][a-z-]+)", Path(L.__file__).with_name("eval.py").read_text())) | {f.replace("_", "-") for f in vars(L.Config())} | {"resume", "help"}
    assert options <= known, options - known
    named = re.findall(r"^\| (?:Sec|Eq|App|Def).* \| `([a-z_]+)` \|", README, re.M)
    assert len(named) == 11 and all(callable(getattr(L, name, None) or getattr(E, name)) for name in named)


def test_trl(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    module = recipe("trl_llds.py")
    seen = []

    class Checked(module.LLDSGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            tool_mask = torch.ones_like(batch["completion_mask"])       # as a multi-turn tool rollout would set it
            tool_mask[:, 2:4] = 0
            batch["tool_mask"] = tool_mask
            batch["llds_tokens"] = self._masks(batch)[1]
            return batch

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            mask = inputs["completion_mask"] * inputs["tool_mask"]
            with torch.no_grad():
                expected = L.llds_loss(self._policy_logps, inputs["old_per_token_logps"], inputs["advantages"], L.action_ids_from_mask(mask))
            seen.append((expected.item(), self._metrics["train"]["llds"][-1]))
            return loss

    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    args = trl.GRPOConfig(output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, num_generations=4, max_completion_length=8, num_iterations=2,
                          max_steps=4, learning_rate=0.05, beta=0.0, report_to=[], use_cpu=True, bf16=False, save_strategy="no", logging_steps=1, disable_tqdm=True)
    reward = lambda completions, **_: [float(len(c) % 3) for c in completions]
    trainer = Checked(model=tiny_model(len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id), args=args, processing_class=tokenizer,
                      reward_funcs=reward, train_dataset=Dataset.from_list([{"prompt": "who wrote the harbour"}] * 8))
    trainer.train()
    assert len(seen) == 4
    for ours, theirs in seen:
        assert abs(ours - theirs) < 1e-6
    assert seen[0][0] == 0 and any(ours > 0 for ours, _ in seen)        # inert in the first pass over a rollout, active in the second


def test_verl(tmp_path, monkeypatch):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    module = recipe("verl_llds.py")
    from verl.workers.config import FSDPActorConfig
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0]])
    old = -torch.rand(3, 6)
    new = (old + 0.3 * torch.randn(3, 6)).requires_grad_()
    A = torch.tensor([1.0, -1.0, 0.0])
    ids, per_token = L.action_ids_from_mask(mask), A[:, None] * mask
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=module.LLDSPolicyLossConfig(loss_mode="grpo_llds", llds_lambda=0.5))
    plain, _ = core.get_policy_loss_fn("vanilla")(old, new, per_token, mask, "token-mean", config)
    ours = L.llds_loss(new, old, A, ids)
    assert ours > 0
    for info, share in (({}, 1.0), ({"batch_num_tokens": mask.sum().item(), "dp_size": 1}, (mask * (A >= 0)[:, None]).sum() / mask.sum())):
        config.global_batch_info.clear()
        config.global_batch_info.update(info)
        total, metrics = core.get_policy_loss_fn("grpo_llds")(old, new, per_token, mask, "token-mean", config)
        assert torch.allclose(total, plain + 0.5 * ours * share, atol=1e-6) and abs(metrics["actor/llds"] - (ours * share).item()) < 1e-6
    assert torch.autograd.grad(total, new)[0].isfinite().all()
