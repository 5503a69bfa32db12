"""Log-probabilities, the training step, files and resuming."""
import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import eval as E
import llds_grpo as L
import retriever as R
from worlds import config, tiny_model


def trajectory(rng, length, reward, prompt=4):
    """A random trajectory of two actions with feedback between."""
    ids = torch.randint(5, 50, (length,), generator=rng).tolist()
    cut = prompt + (length - prompt) // 3
    actions = [0] * prompt + [1] * (cut - prompt) + [0] * 3 + [2] * (length - cut - 3)
    return L.Trajectory({"question": "q"}, ids, actions, [a == 2 for a in actions], [{}, {}], reward=reward)


def rollout_batch(cfg, seed=0):
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(14, 60, (cfg.group_size * cfg.questions_per_step,), generator=rng).tolist()
    rows = [trajectory(rng, n, float(i % 3 == 0)) for i, n in enumerate(lengths)]
    return L.make_minibatches(rows, cfg, torch.device("cpu"))


def with_old(model, reference, minibatches):
    for batch in minibatches:
        batch["old_logps"], batch["entropy"] = L.minibatch_logps(model, batch, with_entropy=True)
        batch["ref_logps"], _ = L.minibatch_logps(reference, batch)
    return minibatches


def test_logps_are_log_softmax_at_action_tokens_only():
    model = tiny_model(151, seed=3)
    ids, actions = torch.randint(0, 151, (3, 20)), torch.randint(0, 3, (3, 19))
    logps, entropy = L.token_logps(model, ids, actions, with_entropy=True, max_logits=7 * 151)
    full = model(ids[:, :-1]).logits.log_softmax(-1)
    expected = full.gather(-1, ids[:, 1:, None])[..., 0] * (actions > 0)
    assert torch.allclose(logps, expected, atol=1e-5)
    assert torch.allclose(entropy, -(full.exp() * full).sum(-1) * (actions > 0), atol=1e-5)
    weights = torch.randn(3, 19)
    grads = [torch.autograd.grad((x * weights).sum(), model.model.layers[0].mlp.up_proj.weight, retain_graph=True)[0] for x in (logps, expected)]
    assert torch.allclose(*grads, atol=1e-5)


def test_logits_that_carry_gradient():
    # p p m m f f m: the last prompt token and the last feedback token predict, the last token of an action does not
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1]])
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    model = tiny_model(11)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    logps, _ = L.token_logps(model, ids, mask[:, 1:])
    assert (logps != 0).int().tolist() == [[0, 1, 1, 0, 0, 1]]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state[0]
    assert torch.allclose(torch.cat(seen), hidden[[1, 2, 5]], atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_a_padded_row_equals_the_row_alone(kind, tmp_path):
    if kind == "gpt2":                                              # absolute positions, and dropout 0.1 by default
        GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64)).save_pretrained(tmp_path)
        model = L.load_policy(str(tmp_path), torch.device("cpu")).train()
    else:
        model = tiny_model(60)
    alone, _ = L.token_logps(model, torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1]]))
    padded, _ = L.token_logps(model, torch.tensor([[5, 6, 7, 8, 0, 0, 0], [9, 9, 9, 9, 9, 9, 9]]), torch.tensor([[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]))
    assert torch.allclose(alone[0], padded[0, :3], atol=1e-5)
    again, _ = L.token_logps(model, torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1]]))
    assert torch.equal(alone, again)                                # no dropout, in train mode either


def test_gpt2_rolls_out_too():
    from worlds import bpe_tokenizer, PASSAGES
    from retriever import BM25Retriever
    tokenizer = bpe_tokenizer()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=512)).eval()
    questions = [{"question": "who", "golden_answers": ["x"]}, {"question": "who wrote the harbour", "golden_answers": ["x"]}]
    cfg = config(max_action_tokens=10, max_total_tokens=300)
    both = L.rollout(model, tokenizer, questions, BM25Retriever(PASSAGES), cfg, None, 0.0)
    assert both[0].ids == L.rollout(model, tokenizer, questions[:1], BM25Retriever(PASSAGES), cfg, None, 0.0)[0].ids


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_first_minibatch_has_delta_exactly_zero_and_llds_acts_from_the_second(objective):
    cfg = config(group_size=4, questions_per_step=4, updates_per_rollout=2, microbatch_tokens=120, objective=objective)
    model, reference = tiny_model(50, seed=4), tiny_model(50, seed=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, second = with_old(model, reference, rollout_batch(cfg))
    assert len(first["microbatches"]) > 2
    a, b = L.update(model, optimizer, first, cfg, 1.0), L.update(model, optimizer, second, cfg, 1.0)
    assert a["llds"] == 0.0 and a["gate_open"] == 0.0 and a["ratio_max"] == 1.0 and a["kl"] == 0.0 and a["grad_norm"] > 0
    assert b["llds"] > 0 and 0 < b["gate_open"] <= 1 and b["ratio_max"] != 1.0 and b["kl"] > 0


@pytest.mark.parametrize("objective", ["grpo", "gspo"])
@pytest.mark.parametrize("gate", ["action", "response", "token"])
def test_the_total_loss_is_eq_6_of_its_terms(objective, gate):
    torch.manual_seed(0)
    cfg = config(group_size=2, questions_per_step=2, objective=objective, gate=gate, llds_lambda=0.3, kl_coef=0.1, clip_eps=0.1)
    ids = torch.tensor([[1, 1, 0, 2, 2], [1, 0, 2, 2, 0]] * 2)
    new, old, ref = torch.randn(3, 4, 5, dtype=torch.float64)
    A, answer = torch.tensor([1.0, -1, 0, 0], dtype=torch.float64), ids == 2
    batch = {"old_logps": old, "ref_logps": ref, "advantages": A, "action_ids": ids, "answer_mask": answer}
    policy = L.grpo_loss(new, old, A, ids, 2, 0.1) if objective == "grpo" else L.gspo_loss(new, old, A, ids, 0.1)
    llds, kl = L.llds_loss(new, old, A, ids, gate, answer, 0.25), L.kl_penalty(new, ref, ids)
    total, terms = L.total_loss(cfg, new, batch, 0.25)
    assert math.isclose(total.item(), (policy + 0.3 * llds + 0.1 * kl).item()) and llds > 0
    assert terms == {"loss": total.item(), "llds": llds.item(), "kl": kl.item()}
    assert llds != L.llds_loss(new, old, A, ids, gate, answer, 1.0)


def test_microbatching_changes_no_value():
    results = []
    for tokens in (10_000, 150, 1):
        cfg = config(group_size=4, questions_per_step=4, updates_per_rollout=2, microbatch_tokens=tokens, kl_coef=0.1)
        model, reference = tiny_model(50, seed=5).double(), tiny_model(50, seed=5).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        metrics = [L.update(model, optimizer, batch, cfg, 0.5) for batch in with_old(model, reference, rollout_batch(cfg))]
        results.append((metrics, torch.cat([p.flatten() for p in model.parameters()]).detach()))
    for metrics, weights in results[1:]:
        assert torch.allclose(weights, results[0][1], atol=1e-5)
        for ours, theirs in zip(metrics, results[0][0]):
            for key in ("loss", "llds", "kl", "grad_norm", "ratio_max", "clip_fraction"):
                assert math.isclose(ours[key], theirs[key], rel_tol=1e-4, abs_tol=1e-6), key


def test_a_column_belongs_to_the_token_that_it_predicts():
    rng, cfg = torch.Generator().manual_seed(0), config(group_size=2, questions_per_step=4, updates_per_rollout=2)
    rows = [trajectory(rng, 14 + 3 * i, float(i in (0, 4, 5, 6, 7))) for i in range(8)]
    batches = L.make_minibatches(rows, cfg, torch.device("cpu"))
    for b, row in enumerate(rows):
        batch, b = batches[b // 4], b % 4
        n = len(row.ids)
        assert batch["input_ids"][b, :n].tolist() == row.ids and not batch["input_ids"][b, n:].any()
        for name in ("action_ids", "answer_mask"):
            assert batch[name][b, :n - 1].tolist() == getattr(row, name)[1:] and not batch[name][b, n - 1:].any()
    assert [batch["advantages"].tolist() for batch in batches] == [[1, -1, 0, 0], [0, 0, 0, 0]]      # equal rewards: no signal


def test_microbatches_hold_little_padding():
    lengths = torch.randint(40, 400, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    pieces = L.microbatches(lengths, 4096)
    longest = [max(lengths[i] for i in rows) for rows in pieces]
    assert sorted(i for rows in pieces for i in rows) == list(range(200))
    assert all(len(rows) * length <= 4096 or len(rows) == 1 for rows, length in zip(pieces, longest))
    assert L.microbatches([60, 400, 60, 60, 390], 4096) == [[1, 4], [0, 2, 3]]             # there is room, but it would be padding
    assert sum(lengths) > 0.85 * sum(len(rows) * length for rows, length in zip(pieces, longest))


def test_gradient_checkpointing_changes_no_value():
    results = []
    for enabled in (False, True):
        cfg = config(group_size=4, questions_per_step=2, updates_per_rollout=1, llds_lambda=0.0)
        model = tiny_model(50, seed=6)
        if enabled:
            model.activation_checkpointing_enable()
            model.train()
        batch, = with_old(model, tiny_model(50, seed=7), rollout_batch(cfg))
        assert L.update(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, cfg, 1.0)["ratio_max"] == 1.0
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.allclose(*results, atol=1e-6)


def test_a_poisoned_step_leaves_the_weights_bit_identical():
    cfg = config(group_size=4, questions_per_step=2, updates_per_rollout=1, llds_lambda=0.0)
    model = tiny_model(50, seed=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch, = with_old(model, tiny_model(50, seed=8), rollout_batch(cfg))
    where = (batch["action_ids"] > 0).nonzero()[0]
    batch["old_logps"][tuple(where)] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    metrics = L.update(model, optimizer, batch, cfg, 1.0)
    assert metrics["skipped"] == 1 and all(torch.equal(p, q) for p, q in zip(model.parameters(), before)) and not optimizer.state


def test_a_finite_loss_with_a_gradient_that_is_not_skips_the_step(monkeypatch):
    cfg = config(group_size=4, questions_per_step=2, updates_per_rollout=1, llds_lambda=0.0)
    model = tiny_model(50, seed=8)
    batch, = with_old(model, tiny_model(50, seed=8), rollout_batch(cfg))
    monkeypatch.setattr(L, "total_loss", lambda cfg, logps, batch, beta: ((logps.sum() * 0).sqrt(), {"loss": 0.0, "llds": 0.0, "kl": 0.0}))
    before = [p.detach().clone() for p in model.parameters()]
    metrics = L.update(model, torch.optim.AdamW(model.parameters(), lr=0.1), batch, cfg, 1.0)
    assert metrics["skipped"] == 1 and metrics["loss"] == 0 and all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_update_metrics_by_hand():
    cfg = config(group_size=4, questions_per_step=1, updates_per_rollout=1, llds_lambda=0.0)
    model, rng = tiny_model(50, seed=8), torch.Generator().manual_seed(0)
    rows = [trajectory(rng, 20 + 3 * i, 1.0 - i % 2) for i in range(4)]
    batch, = with_old(model, model, L.make_minibatches(rows, cfg, torch.device("cpu")))
    mask, shift = batch["action_ids"] > 0, torch.zeros_like(batch["old_logps"])
    shift[0], shift[1] = math.log(1.5), math.log(0.5)              # ratios; A = 1 and -1: both are cut
    shift[2], shift[3] = math.log(0.5), math.log(1.5)              # A = 1 and -1 the other way: neither is
    shift[2][batch["action_ids"][2] == 1] = math.log(3)
    batch["old_logps"] = (batch["old_logps"] - shift) * mask
    metrics = L.update(model, torch.optim.SGD(model.parameters(), lr=0.0), batch, cfg, 1.0)
    cut = mask[0].sum() + mask[1].sum() + (batch["action_ids"][2] == 1).sum()
    assert math.isclose(metrics["clip_fraction"], cut / mask.sum(), rel_tol=1e-5) and math.isclose(metrics["ratio_max"], 3, rel_tol=1e-4)
    assert metrics["gate_open"] == 0.25                            # of Y_pre's four actions the second one of row 2 lost likelihood


def test_float32_master_weights_move_at_small_rates(tmp_path):
    tiny_model(50).to(torch.bfloat16).save_pretrained(tmp_path)
    model = L.load_policy(str(tmp_path), torch.device("cpu"))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_long_action():
    cfg = config(group_size=2, questions_per_step=1, updates_per_rollout=1, llds_lambda=0.0)
    rng = torch.Generator().manual_seed(0)
    rows = [trajectory(rng, 4200, 1.0), trajectory(rng, 30, 0.0)]
    rows[0].action_ids = [0] * 4 + [1] * 4196
    model = tiny_model(50, max_position_embeddings=8192)
    batch, = with_old(model, model, L.make_minibatches(rows, cfg, torch.device("cpu")))
    assert math.isfinite(L.update(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, cfg, 1.0)["loss"])


def test_displacement_probe_restores_weights_and_optimizer():
    cfg = config(group_size=4, questions_per_step=4, updates_per_rollout=4)
    model = tiny_model(50, seed=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = with_old(model, model, rollout_batch(cfg))
    L.update(model, optimizer, batches[0], cfg, 1.0)                # gives the optimiser a state
    before, state = [p.detach().clone() for p in model.parameters()], {k: v["exp_avg"].clone() for k, v in optimizer.state_dict()["state"].items()}
    rewards = [torch.tensor(r) for r in ([1.0, 0, 0, 1], [1.0, 1, 1, 1], [0.0, 1, 0, 0])]
    groups = [{"rewards": r, "action_ids": b["action_ids"], "batch": b} for r, b in zip(rewards, batches)]
    logps_of = lambda g: L.token_logps(model, g["batch"]["input_ids"], g["action_ids"])[0]
    loss_of = lambda lp, g: L.grpo_loss(lp, lp.detach(), L.group_advantages(g["rewards"][None])[0], g["action_ids"], 4)
    deltas = E.displacement_probe(groups, logps_of, loss_of, optimizer)
    assert deltas[1] is None and deltas[0] != 0 and deltas[2] != 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert all(torch.equal(v["exp_avg"], state[k]) for k, v in optimizer.state_dict()["state"].items())
    assert deltas[2] == E.displacement_probe(groups[2:], logps_of, loss_of, optimizer)[0]     # every question from the same weights


def test_displacement_probe_by_hand():
    # logits z = (0, 0), one right response "token 0", one wrong "token 1", A = (1, -1), ratio 1:
    # L = -(ln p0 - ln p1) / 2 has gradient (-1/2, 1/2); SGD of rate 1 gives z = (1/2, -1/2), ln p0 = -ln(1 + e^-1)
    z = torch.zeros(2, requires_grad=True)
    ids = torch.tensor([[1], [1]])
    group = {"rewards": torch.tensor([1.0, 0.0]), "action_ids": ids}
    delta, = E.displacement_probe([group], lambda g: z.log_softmax(-1)[:, None], lambda lp, g: L.grpo_loss(lp, lp.detach(), torch.tensor([1.0, -1.0]), ids, 2),
                                  torch.optim.SGD([z], lr=1.0))
    assert math.isclose(delta, math.log(2) - math.log(1 + math.exp(-1)), rel_tol=1e-6) and z.tolist() == [0, 0]


def test_a_step_asks_each_question_g_times_in_a_row(monkeypatch):
    asked = []

    def rollout(model, tokenizer, questions, retriever, cfg, generator):
        asked.extend(q["id"] for q in questions)
        rng = torch.Generator().manual_seed(len(asked))
        return [trajectory(rng, 20, float(q["id"] == "0")) for q in questions]

    monkeypatch.setattr(L, "rollout", rollout)
    cfg = config(group_size=3, questions_per_step=4, updates_per_rollout=2, rollout_batch=5)
    model, questions = tiny_model(50), [{"id": str(i)} for i in range(4)]
    row = L.train_step(0, model, tiny_model(50), None, torch.optim.SGD(model.parameters(), lr=0.1), None, [], questions, None, cfg)
    assert sorted(asked[::3]) == ["0", "1", "2", "3"] and asked == [q for q in asked[::3] for _ in range(3)]
    assert row["zero_groups"] == 1 and row["reward"] == 0.25 and row["match_ratio"] is None


# ---------------------------------------------------------------------------------------------------------- the program

def run(tmp_path, name, *options):
    out = tmp_path / name
    code = L.main(["--out", str(out), "--steps", "4", "--save-every", "2", "--questions-per-step", "4", "--group-size", "3",
                   "--updates-per-rollout", "2", *options])
    return out, code


def timeless(out):
    return [{k: v for k, v in row.items() if "second" not in k} for row in R.read_metrics(out)]


def test_same_seed_same_run_and_resume_equals_an_uninterrupted_run(tmp_path):
    whole, code = run(tmp_path, "whole")
    assert code == 0 and len(timeless(whole)) == 4
    half, code = run(tmp_path, "half", "--steps", "2")
    assert code == 0 and timeless(half) == timeless(whole)[:2]
    with open(half / "metrics.jsonl", "a") as log:                  # a step after the checkpoint, and a torn line
        log.write('{"step": 2, "reward": 0.5}\n{"step": 3, "rew')
    assert L.main(["--resume", str(half), "--steps", "4"]) == 0
    assert timeless(half) == timeless(whole)
    weights = [L.load_policy(str(L.checkpoints(out)[-1]), torch.device("cpu")).state_dict() for out in (whole, half)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))
    assert [p.name for p in L.checkpoints(half)] == ["checkpoint-2", "checkpoint-4"]
    names = set(json.loads((whole / "metrics.jsonl").read_text().splitlines()[0]))
    assert names >= {"step", "reward", "logp_right", "logp_wrong", "logp_right_action1", "logp_right_action2", "entropy", "action_tokens", "searches",
                     "valid_actions", "match_ratio", "grad_norm", "ratio_max", "clip_fraction", "kl", "llds", "gate_open", "beta", "zero_groups",
                     "truncated", "tokens_per_second", "logp_probe"}


def test_an_evaluation_in_between_does_not_change_the_run(tmp_path, monkeypatch):
    whole, _ = run(tmp_path, "whole", "--steps", "2")
    save = L.save_checkpoint

    def save_and_evaluate(out, step, *rest):
        save(out, step, *rest)
        assert E.main([str(out), "--limit", "4"]) == 0
        torch.rand(3)                                              # what else draws random numbers must not matter either
    monkeypatch.setattr(L, "save_checkpoint", save_and_evaluate)
    other, _ = run(tmp_path, "other", "--steps", "2", "--save-every", "1")
    assert timeless(other) == timeless(whole)


def test_groups_of_one_give_no_signal(tmp_path):
    out, code = run(tmp_path, "one", "--steps", "1", "--group-size", "1")
    row, = timeless(out)
    assert code == 0 and row["zero_groups"] == 1 and row["loss"] == 0 and row["skipped"] == 0


def test_out_of_memory_names_the_settings(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(L, "train_step", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    assert run(tmp_path, "oom", "--microbatch-tokens", "777")[1] == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--microbatch-tokens (now 777)" in error and "--rollout-batch (now 160)" in error


def test_adamw_state_survives_a_resume(tmp_path):
    # w = 1, rate 0.1, no decay, gradients 1, .1, .1, .1, interrupted after two: 0.70526 (0.62592 with a fresh optimiser)
    def steps(w, optimizer, grads):
        for g in grads:
            w.grad = torch.tensor([g])
            optimizer.step()
    make = lambda value: (w := torch.nn.Parameter(torch.tensor([value])), torch.optim.AdamW([w], lr=0.1, weight_decay=0.0))
    w, optimizer = make(1.0)
    steps(w, optimizer, [1.0, 0.1])
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "trainer.pt")
    w, optimizer = make(w.item())
    optimizer.load_state_dict(torch.load(tmp_path / "trainer.pt", weights_only=True)["optimizer"])
    steps(w, optimizer, [0.1, 0.1])
    assert math.isclose(w.item(), 0.70526, abs_tol=1e-5)


def test_gradient_checkpointing_leaves_the_rollout_alone(tmp_path):
    runs = [timeless(run(tmp_path, name, "--steps", "3", *options)[0]) for name, options in (("a", []), ("b", ["--gradient-checkpointing"]))]
    for a, b in zip(*runs):
        assert all(a[k] == b[k] for k in ("reward", "action_tokens", "searches", "match_ratio")) and math.isclose(a["logp_wrong"], b["logp_wrong"], rel_tol=1e-4)


def test_the_probe_is_of_the_initial_policy_and_fixed(tmp_path):
    out, _ = run(tmp_path, "probe", "--kl-coef", "0")
    rows = timeless(out)
    assert math.isclose(rows[0]["logp_probe"], rows[0]["logp_right"], rel_tol=1e-5)         # all of step 0's right responses
    policy, tokenizer = L.load_policy(str(R.checkpoints(out)[-1]), torch.device("cpu")), L.load_tokenizer(L.TINY.model)
    state = torch.load(out / "checkpoint-2" / "trainer.pt", weights_only=True)
    half = L.load_policy(str(out / "checkpoint-2"), torch.device("cpu"))
    assert math.isclose(L.probe_logp(half, state["probe"], config()), rows[2]["logp_probe"], rel_tol=1e-4)
    assert all("<answer>" in tokenizer.decode(ids) for ids, _ in state["probe"]) and L.probe_logp(policy, [], config()) is None


def test_temperature_enters_old_new_and_reference_log_probabilities_alike(tmp_path):
    row, = timeless(run(tmp_path, "hot", "--steps", "1", "--temperature", "2", "--updates-per-rollout", "1", "--llds-lambda", "0")[0])
    assert row["ratio_max"] == 1 and row["kl"] == 0
    model, reference = tiny_model(50, seed=4), tiny_model(50, seed=5)
    cfg = config(group_size=4, questions_per_step=4, updates_per_rollout=2, temperature=0.5)
    batches = rollout_batch(cfg)
    for batch in batches:
        batch["old_logps"], batch["entropy"] = L.minibatch_logps(model, batch, 0.5, True)
        batch["ref_logps"], _ = L.minibatch_logps(reference, batch, 0.5)
    assert L.update(model, torch.optim.SGD(model.parameters(), lr=0.1), batches[0], cfg, 1.0)["ratio_max"] == 1.0
    assert not torch.equal(batches[0]["old_logps"], L.minibatch_logps(tiny_model(50, seed=4), batches[0])[0])


def test_other_objectives_run(tmp_path):
    for name, options in {"gspo": ["--objective", "gspo"], "ma": ["--answer-beta", "adaptive"], "plain": ["--llds-lambda", "0", "--updates-per-rollout", "1"],
                          "nokl": ["--kl-coef", "0"], "token": ["--gate", "token"]}.items():
        out, code = run(tmp_path, name, "--steps", "1", *options)
        row, = timeless(out)
        assert code == 0 and row["skipped"] == 0 and (name != "nokl" or row["kl"] == 0)
        assert name != "ma" or row["beta"] == min(row["searches"] / 2, 1)


@pytest.mark.parametrize("options, message", [
    (["--updates-per-rollout", "1"], "LLDS never acts"), (["--gate", "chunk"], "action, response, token"), (["--questions-per-step", "5", "--updates-per-rollout", "2"], "multiple"),
    (["--data", "missing.jsonl"], "no such file"), (["--corpus", "missing.jsonl"], "no such file"), (["--answer-beta", "x"], "adaptive"),
    (["--model", "nowhere/at/all"], "cannot load"), (["--resume", "nowhere"], "no run"), (["--resume", "x", "--lr", "1"], "--lr"), (["--temperature", "0"], "temperature"),
    (["--max-total-tokens", "5"], "no room"), (["--group-size", "0"], "at least 1"), (["--max-turns", "-1"], "at least 1"), (["--seed", "-1"], "at least 0")])
def test_bad_options_are_one_sentence_and_exit_code_2(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert L.main(["--steps", "1", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_an_existing_run_is_not_overwritten(tmp_path, capsys):
    out, _ = run(tmp_path, "a", "--steps", "1")
    before = (out / "metrics.jsonl").read_text()
    assert run(tmp_path, "a", "--steps", "1")[1] == 2 and "--resume" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_text() == before


# -------------------------------------------------------------------------------------------------------------- the file

SOURCE = Path(L.__file__).read_text() + Path(E.__file__).read_text()
MATHS = ["group_advantages", "log_ratio", "grpo_loss", "gspo_loss", "kl_penalty", "action_displacement", "displacement_probe",
         "token_displacement", "llds_loss", "answer_beta", "death_spiral", "action_ids_from_mask"]


def function(name):
    return getattr(L, name, None) or getattr(E, name, None)


def lines_of(name):
    return re.search(rf"^def {name}\(.*?(?=^\S)", SOURCE + "\nend", re.M | re.S).group(0)


@pytest.mark.parametrize("name", MATHS)
def test_a_pasted_function_runs_alone(name):
    """Its own lines, those of the helpers its docstring names, and import torch are enough."""
    space = {}
    helpers = re.findall(r"Needs (\w+)\.", function(name).__doc__)
    exec("import torch\n" + "\n".join(lines_of(n) for n in [*helpers, name]), space)
    ids, A = torch.tensor([[1, 1, 0, 2]] * 2), torch.tensor([1.0, -1.0])
    new, old = torch.tensor([[-1.0, -2, -3, -1], [-1.0, -1, -1, -1]]), torch.full((2, 4), -1.2)
    z = torch.zeros(2, 4, requires_grad=True)
    arguments = {"group_advantages": (A[None],), "log_ratio": (new, old, ids > 0), "grpo_loss": (new, old, A, ids, 2), "gspo_loss": (new, old, A, ids),
                 "kl_penalty": (new, old, ids), "action_displacement": (new, old, ids), "token_displacement": (new, old),
                 "llds_loss": (new, old, A, ids), "answer_beta": (1.5,), "death_spiral": ([{"reward": 0.1, "logp_right": -0.1, "grad_norm": 1.0}] * 30,),
                 "action_ids_from_mask": (ids > 0,),
                 "displacement_probe": ([{"rewards": A.clamp(min=0), "action_ids": ids}], lambda g: z - 1, lambda lp, g: lp.sum(), torch.optim.SGD([z], lr=0.1))}
    ours, pasted = function(name)(*arguments[name]), space[name](*arguments[name])
    assert torch.equal(ours, pasted) if torch.is_tensor(ours) else ours == pasted


def test_the_map_in_the_docstring_names_real_functions_and_every_equation_once():
    table = L.__doc__.split("Symbols.")[1].split("Departures.")[0]
    rows = [line.split() for line in table.splitlines() if line.startswith("    ")]
    named = [word for row in rows for word in row if re.fullmatch(r"[a-z_]+", word) and callable(function(word))]
    assert set(MATHS) - {"log_ratio"} | {"total_loss", "rollout", "exact_match", "token_logps"} == set(named)
    equations = re.findall(r"Eq\. (\d+)", table)
    assert sorted(map(int, equations)) == [1, 2, 3, 4, 5, 6, 9, 10]
