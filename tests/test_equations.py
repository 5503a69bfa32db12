"""Every equation against stored vectors (float64), a hand-worked example, and its gradient."""
import json
import math
from pathlib import Path

import pytest
import torch

import eval as E
import llds_grpo as L

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def inputs(case):
    x = case["inputs"]
    rewards, groups = f64(x["rewards"]), x["group_ids"]
    A = f64(x["advantages_override"]) if "advantages_override" in x else f64(case["expected"]["advantage"]["population"])
    return {"logps": f64(x["log_prob"]).requires_grad_(), "old": f64(x["old_log_prob"]), "ref": f64(x["ref_log_prob"]),
            "ids": torch.tensor(x["action_ids"]), "answer": torch.tensor(x["answer_mask"]).bool(), "rewards": rewards, "groups": groups, "A": A}


def grouped(x):
    """(start, size) of each run of equal group ids."""
    sizes = []
    for g in x["groups"]:
        if sizes and sizes[-1][0] == g:
            sizes[-1][1] += 1
        else:
            sizes.append([g, 1])
    starts = [sum(n for _, n in sizes[:i]) for i in range(len(sizes))]
    return [(s, n) for s, (_, n) in zip(starts, sizes)]


def close(value, expected, case):
    value = value.detach() if torch.is_tensor(value) else f64(value)
    expected = f64(expected)
    relative = case["name"] == "large_log_ratio"
    assert torch.allclose(value, expected, rtol=1e-10 if relative else 0, atol=1e-10), (value, expected)


def gradient(loss, x):
    return torch.autograd.grad(loss, x["logps"], retain_graph=True, allow_unused=True)[0]


def test_advantages_of_the_vectors(case):
    if "advantages_override" in case["inputs"]:
        pytest.skip("the advantages are given in this case")
    x = inputs(case)
    ours = torch.cat([L.group_advantages(x["rewards"][s:s + n][None])[0] for s, n in grouped(x)])
    close(ours, case["expected"]["advantage"]["population"], case)


def test_eq1_of_the_vectors(case):
    x, expected = inputs(case), case["expected"]
    pieces = [L.grpo_loss(x["logps"][s:s + n], x["old"][s:s + n], x["A"][s:s + n], x["ids"][s:s + n], n) for s, n in grouped(x)]
    loss = torch.stack(pieces).mean()
    close(loss, expected["eq1_loss"]["group"]["population"], case)
    close(gradient(loss, x), expected["grad"]["eq1_loss_group_population"], case)
    sizes = {n for _, n in grouped(x)}
    if len(sizes) == 1:                                          # all groups in one call
        close(L.grpo_loss(x["logps"], x["old"], x["A"], x["ids"], sizes.pop()), expected["eq1_loss"]["group"]["population"], case)


def test_gspo_of_the_vectors(case):
    x, expected = inputs(case), case["expected"]
    loss = torch.stack([L.gspo_loss(x["logps"][s:s + n], x["old"][s:s + n], x["A"][s:s + n], x["ids"][s:s + n]) for s, n in grouped(x)]).mean()
    close(loss, expected["gspo_loss"]["population"], case)
    close(gradient(loss, x), expected["grad"]["gspo_loss_population"], case)


@pytest.mark.parametrize("gate, key", [("action", "eq4_llds"), ("token", "eq9_token"), ("response", "eq10_response")])
def test_llds_gates_of_the_vectors(case, gate, key):
    x, expected = inputs(case), case["expected"]
    loss = L.llds_loss(x["logps"], x["old"], x["A"], x["ids"], gate)
    close(loss, expected[key], case)
    close(gradient(loss, x), expected["grad"][key], case)


def test_llds_ma_of_the_vectors(case):
    x, expected = inputs(case), case["expected"]
    for beta, value in expected["eq5_llds_ma"].items():
        loss = L.llds_loss(x["logps"], x["old"], x["A"], x["ids"], "action", x["answer"], float(beta))
        close(loss, value, case)
        if f"eq5_llds_ma_{beta}" in expected["grad"]:
            close(gradient(loss, x), expected["grad"][f"eq5_llds_ma_{beta}"], case)


def test_displacement_and_kl_of_the_vectors(case):
    x, expected = inputs(case), case["expected"]
    d = L.action_displacement(x["logps"], x["old"], x["ids"])
    for row, sums in zip(d, expected["def41_action_change"]):
        close(row[:len(sums)], sums, case)
        assert not row[len(sums):].any()
    assert [bool(s <= 0) for s in d.sum(1)] == expected["eq2_lld_response_eps0"]
    delta = L.token_displacement(x["logps"], x["old"])
    sums = [[delta[i][x["ids"][i] == k + 1].sum().item() for k in range(len(row))] for i, row in enumerate(expected["delta_action_sums"])]
    for ours, row in zip(sums, expected["delta_action_sums"]):
        close(ours, row, case)
    kl = L.kl_penalty(x["logps"], x["ref"], x["ids"])
    close(kl, expected["kl_k3"], case)
    close(gradient(kl, x), expected["grad"]["kl_k3"], case)


def test_eq6_of_the_vectors(case):
    x, expected = inputs(case), case["expected"]
    grpo = torch.stack([L.grpo_loss(x["logps"][s:s + n], x["old"][s:s + n], x["A"][s:s + n], x["ids"][s:s + n], n) for s, n in grouped(x)]).mean()
    close(grpo + 0.2 * L.llds_loss(x["logps"], x["old"], x["A"], x["ids"]), expected["eq6_total"]["llds"], case)
    sizes = {n for _, n in grouped(x)}
    if len(sizes) == 1:
        batch = {"old_logps": x["old"], "ref_logps": x["ref"], "advantages": x["A"], "action_ids": x["ids"], "answer_mask": x["answer"]}
        total, _ = L.total_loss(L.Config(group_size=sizes.pop()), x["logps"], batch, beta=1.0)
        close(total, expected["eq6_total_plus_kl"], case)


def test_beta_schedule():
    for row in VECTORS["meta"]["beta_schedule"]:
        assert L.answer_beta(row["V_s"]) == row["paper"]


# ------------------------------------------------------------------- agreement with the authors' code, by a stated relation

def test_official_value_is_ours_times_preserving_share(case):
    """official LLDS = ours * N_pre / N_all, where Y_pre is the same under the official advantages and actions do not touch."""
    if case["name"] == "adjacent_actions" or not any(map(any, case["inputs"]["action_ids"])):
        pytest.skip("the official code merges neighbouring actions")
    x, official = inputs(case), case["official"]
    A = f64(official["advantage"]) if not isinstance(official["advantage"][0], list) else None
    share = ((x["ids"] > 0) & (A >= 0)[:, None]).sum() / (x["ids"] > 0).sum().double()
    for gate, key in (("action", "noreduce_over_lambda_chunk"), ("response", "noreduce_over_lambda_sentence")):
        ours = L.llds_loss(x["logps"], x["old"], A, x["ids"], gate)
        assert math.isclose(ours.item() * share.item(), official[key], rel_tol=1e-9, abs_tol=1e-10), (gate, ours * share, official[key])


def test_official_gspo_is_ours_with_the_population_advantage(case):
    if case["name"] in ("large_log_ratio", "adjacent_actions"):
        pytest.skip("the official code caps the log-ratio at 10")
    x = inputs(case)
    official = case["official"]["pg_loss_gspo_given_population_advantage"]
    mask = x["ids"] > 0
    full = mask.any(1)                                            # the official mean leaves empty responses out
    ours = L.gspo_loss(x["logps"], x["old"], x["A"], x["ids"]) * len(full) / full.sum()
    assert math.isclose(ours.item(), official, rel_tol=1e-6, abs_tol=1e-8)


# -------------------------------------------------------------------------------------------------- hand-worked examples

def test_group_advantages_by_hand():
    # rewards 1,0,1: mean 2/3, population std sqrt(2)/3 -> (1/3)/(sqrt(2)/3) = 0.7071 and -1.4142
    A = L.group_advantages(f64([[1, 0, 1], [0, 0, 1]]))
    assert torch.allclose(A, f64([[0.5 ** 0.5, -2 ** 0.5, 0.5 ** 0.5], [-0.5 ** 0.5, -0.5 ** 0.5, 2 ** 0.5]]))
    assert torch.allclose(L.group_advantages(f64([[1, 0, 0, 0, 0]])), f64([[2, -0.5, -0.5, -0.5, -0.5]]))
    assert L.group_advantages(torch.tensor([[1.0]])).item() == 0.0


@pytest.mark.parametrize("reward, n", [(0.1, 7), (0.3, 6), (1.0, 5), (0.0, 5)])
def test_equal_rewards_give_exactly_zero(reward, n):
    A = L.group_advantages(torch.full((1, n), reward))
    assert A.tolist() == [[0.0] * n]
    ids = torch.ones(n, 2, dtype=torch.long)
    old = torch.zeros(n, 2)
    assert L.llds_loss(old - 1.0, old, A[0], ids).item() == 1.0   # and the group stays in Y_pre


def test_grpo_loss_by_hand():
    # one question, G = 2, A = (+1, -1); ratios: row 1 (2, 1), row 2 (0.5, one token). eps = 0.2
    # min(2*1, 1.2*1) = 1.2, min(1, 1) = 1; min(-0.5, -0.8) = -0.8. J = (1.2 + 1 - 0.8) / 3
    logps, old = f64([[math.log(2), 0.0], [math.log(0.5), 7.0]]), f64([[0.0, 0.0], [0.0, -9.0]])
    loss = L.grpo_loss(logps, old, f64([1, -1]), torch.tensor([[1, 2], [1, 0]]), 2)
    assert math.isclose(loss.item(), -1.4 / 3)


def test_grpo_averages_tokens_within_a_question_then_questions():
    # A = 1 everywhere, ratio 1 for question 1 (1 token), ratio 0.5 for question 2 (3 tokens): J = (1 + 0.5) / 2
    logps = f64([[0.0, 0, 0], [math.log(0.5)] * 3])
    loss = L.grpo_loss(logps, torch.zeros_like(logps), f64([1, 1]), torch.tensor([[1, 0, 0], [1, 1, 1]]), 1)
    assert math.isclose(loss.item(), -0.75)


def test_token_mean_is_one_count_for_the_group():
    # row 1 has four tokens, row 2 one; as ratio * A of 1 and 5: (4 * 1 + 5) / 5 = 1.8, not a mean of means (3.0)
    ids = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    loss = L.grpo_loss(torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor([1.0, 5.0]), ids, 2)
    assert math.isclose(loss.item(), -1.8, rel_tol=1e-6)


def test_gspo_loss_by_hand():
    # s_1 = exp((ln 2 + ln 0.5) / 2) = 1, A = 1 -> 1; s_2 = exp(ln 4 / 2) = 2, A = -1 -> min(-2, -1.2) = -2; J = (1 - 2) / 2
    logps = f64([[math.log(2), math.log(0.5)], [math.log(4), 0.0]])
    assert math.isclose(L.gspo_loss(logps, torch.zeros_like(logps), f64([1, -1]), torch.ones(2, 2, dtype=torch.long)).item(), 0.5)


def test_kl_by_hand():
    # d = ln 2: 2 - ln 2 - 1; d = 0: 0. Mean over the two action tokens, the feedback token is left out.
    logps, ref = f64([[0.0, 0.0, 0.0]]), f64([[math.log(2), 0.0, 50.0]])
    assert math.isclose(L.kl_penalty(logps, ref, torch.tensor([[1, 1, 0]])).item(), (1 - math.log(2)) / 2)
    # d = 5: 148.4 - 6 is bounded at 10 and has no gradient; d = -5: .0067 + 4
    logps = f64([[0.0, 0.0]]).requires_grad_()
    kl = L.kl_penalty(logps, f64([[5.0, -5.0]]), torch.tensor([[1, 1]]))
    kl.backward()
    assert math.isclose(kl.item(), (10 + math.exp(-5) + 4) / 2) and math.isclose(logps.grad[0, 1].item(), (1 - math.exp(-5)) / 2) and logps.grad[0, 0] == 0


def test_action_displacement_by_hand():
    logps, old = f64([[-1.0, -2.0, -9.0, -0.5]]), f64([[-0.5, -1.0, 0.0, -1.0]])
    assert L.action_displacement(logps, old, torch.tensor([[1, 1, 0, 2]])).tolist() == [[-1.5, 0.5]]


# Two responses, old = -1 everywhere, feedback in column 2 (and an unused last column): the worked example of a faulty port.
OLD = torch.full((2, 6), -1.0, dtype=torch.float64)
IDS = torch.tensor([[1, 1, 0, 2, 2, 0]] * 2)
NEW = f64([[-1.5, -0.8, -9, -0.5, -1.1, -1], [-2, -2, -9, -2, -2, -1]])
MIXED = f64([[-1.5, -0.2, -9, -1.5, -1.1, -1]])


@pytest.mark.parametrize("A, action, response", [([1, -1], 0.125, 0.0), ([0, 0], 0.5625, 0.5), ([-1, -1], 0.0, 0.0)])
def test_llds_by_hand(A, action, response):
    # row 1, action 1: Delta .5, -.2 (sum .3 > 0: open, .5); action 2: -.5, .1 (closed). Row 2: 1 on four tokens.
    assert math.isclose(L.llds_loss(NEW, OLD, f64(A), IDS).item(), action, abs_tol=1e-12)
    assert math.isclose(L.llds_loss(NEW, OLD, f64(A), IDS, "response").item(), response, abs_tol=1e-12)
    garbage = NEW.masked_fill(IDS == 0, float("nan"))             # what stands under mask 0 changes nothing
    assert math.isclose(L.llds_loss(garbage, OLD, f64(A), IDS).item(), action, abs_tol=1e-12)


def test_llds_gates_differ_by_hand():
    # actions: (.5, -.8) closed, (.5, .1) open. Action gate .6/4; response sum .3 > 0: (.5 + .5 + .1)/4; token the same
    assert math.isclose(L.llds_loss(MIXED, OLD[:1], f64([1]), IDS[:1]).item(), 0.15)
    assert math.isclose(L.llds_loss(MIXED, OLD[:1], f64([1]), IDS[:1], "response").item(), 0.275)
    assert math.isclose(L.llds_loss(MIXED, OLD[:1], f64([1]), IDS[:1], "token").item(), 0.275)
    with pytest.raises(ValueError, match="sentence"):
        L.llds_loss(MIXED, OLD[:1], f64([1]), IDS[:1], "sentence")


def test_llds_ma_by_hand():
    # one action, Delta 1 and 1, the second token in the answer span: (1 + beta * 1) / 2; the gate sums 2, unweighted
    logps, ids = f64([[-1.0, -1.0]]), torch.tensor([[1, 1]])
    assert math.isclose(L.llds_loss(logps, torch.zeros_like(logps), f64([1]), ids, answer_mask=torch.tensor([[0, 1]]), beta=0.25).item(), 0.625)
    logps = f64([[0.5, -1.0]])                                    # Delta -.5, 1: a gate that dropped the answer would close
    assert math.isclose(L.llds_loss(logps, torch.zeros_like(logps), f64([1]), ids, answer_mask=torch.tensor([[0, 1]]), beta=0.5).item(), 0.25)


def test_old_equals_new_gives_zero_value_and_zero_gradient():
    logps = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.ones(4, 6, dtype=torch.long)
    A = f64([1.0, 1, -1, -1])
    for gate in ("action", "response", "token"):
        loss = L.llds_loss(logps, logps.detach().clone(), A, ids, gate)
        assert loss.item() == 0.0
        assert not torch.autograd.grad(loss, logps)[0].any()
    assert torch.autograd.grad(L.grpo_loss(logps, logps.detach().clone(), A, ids, 4), logps)[0].any()   # GRPO still learns


# ---------------------------------------------------------------------------------------------------- extreme numbers

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("A, value", [(1.0, -1.2), (0.0, 0.0), (-1.0, None)])
def test_huge_ratio_is_finite(A, value, dtype):
    logps = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    loss = L.grpo_loss(logps, torch.full((1, 1), -120.0, dtype=dtype), torch.tensor([A], dtype=dtype), torch.ones(1, 1, dtype=torch.long), 1)
    grad = torch.autograd.grad(loss, logps)[0]
    assert loss.isfinite() and grad.isfinite().all()
    if value is not None:
        assert math.isclose(loss.item(), value, rel_tol=1e-6) and grad.item() == 0.0


@pytest.mark.parametrize("poison", [200.0, float("-inf"), float("nan"), float("inf")])
def test_masked_tokens_cannot_poison(poison):
    ids, A = torch.tensor([[1, 0]]), torch.tensor([1.0])
    for make in (lambda lp, old: L.grpo_loss(lp, old, A, ids, 1), lambda lp, old: L.gspo_loss(lp, old, A, ids),
                 lambda lp, old: L.kl_penalty(lp, old, ids), lambda lp, old: L.llds_loss(lp, old, A, ids)):
        results = []
        for masked in (0.0, poison):
            logps = torch.tensor([[-0.3, 0.1]], requires_grad=True)
            loss = make(logps, torch.tensor([[-0.2, masked]]))
            results.append([loss.item(), *torch.autograd.grad(loss, logps)[0][0].tolist()])
        assert results[0] == results[1] and all(map(math.isfinite, results[1]))


def test_empty_masks_give_zero_and_no_nan():
    logps = torch.randn(2, 3, requires_grad=True)
    ids, A, old = torch.zeros(2, 3, dtype=torch.long), torch.tensor([1.0, -1.0]), torch.randn(2, 3)
    for loss in (L.grpo_loss(logps, old, A, ids, 2), L.gspo_loss(logps, old, A, ids), L.kl_penalty(logps, old, ids), L.llds_loss(logps, old, A, ids)):
        assert loss.item() == 0.0 and not torch.autograd.grad(loss, logps)[0].any()
    assert L.action_displacement(logps, old, ids).shape == (2, 0)


def test_advantages_do_not_broadcast_over_tokens():
    # A = (1, -1) on 2 x 2 tokens at ratio 1: gradient of row 1 is -1/4 each, of row 2 +1/4
    logps = torch.zeros(2, 2, requires_grad=True)
    loss = L.grpo_loss(logps, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), torch.ones(2, 2, dtype=torch.long), 2)
    assert torch.autograd.grad(loss, logps)[0].tolist() == [[-0.25, -0.25], [0.25, 0.25]]


# ------------------------------------------------------------------------------------------------------ the death spiral

def history(logp, reward):
    return [{"logp_right": l, "reward": r} for l, r in zip(logp, reward)]


def test_death_spiral_names_the_phases():
    n = 40
    flat, rise = [-0.05] * n, [0.2 + 0.01 * i for i in range(n)]
    spiral = lambda logp, reward: E.death_spiral(history(logp, reward))
    assert spiral(flat[:15], rise[:15])["since"] is None and "too short" in spiral(flat[:15], rise[:15])["text"]
    for healthy in (flat, [-0.5 + 0.01 * i for i in range(n)], [-0.1] * n):
        assert spiral(healthy, rise)["phase"] == 0 and "healthy" in spiral(healthy, rise)["text"]
    slow = flat + [-0.05 - 0.004 * i for i in range(30)]                  # decays by 0.004 a step, the reward still rises
    second = spiral(slow, [0.2 + 0.005 * i for i in range(70)])
    assert second["phase"] == 2 and 39 <= second["since"] <= 47 and second["spans"] == [("II", second["since"], 69)]
    fast = slow + [slow[-1] - 0.1 * i for i in range(20)]                 # then by 0.1 a step, and the reward falls
    third = spiral(fast, [0.2 + 0.005 * i for i in range(70)] + [0.5 - 0.02 * i for i in range(20)])
    assert third["phase"] == 3 and 70 <= third["since"] <= 80 and [s[0] for s in third["spans"]] == ["II", "III"]
    dip = flat + [-0.3] * 5 + flat                                        # a dip that heals is no spiral
    assert spiral(dip, [0.5] * len(dip))["phase"] == 0 and "recovered" in spiral(dip, [0.5] * len(dip))["text"]
    deep = flat + [-0.3] * 20 + flat                                      # nor is one of 20 steps, in both
    assert "recovered" in spiral(deep, [0.8] * n + [0.3] * 20 + [0.8] * n)["text"]
    dead = fast + [None] * 30                                             # no right response left
    assert spiral(dead, [0.5] * 90 + [0.0] * 30)["phase"] == 3


def test_death_spiral_is_about_the_likelihood():
    alone = E.death_spiral(history([-0.1] * 60, [0.8] * 30 + [0.05] * 30))
    assert alone["phase"] == 0 and "collapsed from 0.800 to 0.050" in alone["text"] and "has not fallen" in alone["text"]
    none = E.death_spiral(history([None] * 60, [0.0] * 60))
    assert none["phase"] == 0 and "no right response" in none["text"]
    late = E.death_spiral(history([None] * 20 + [-0.1] * 40, [0.0] * 20 + [0.5] * 40))    # the first one comes late
    assert "healthy" in late["text"]


# ------------------------------------------------------------------------------------------------------------ temperature

def test_temperature_enters_log_probabilities_and_entropy():
    class Fixed(torch.nn.Module):                                         # a "model" whose logits are given
        def __init__(self, logits):
            super().__init__()
            self.logits = torch.tensor(logits)

        def base_model(self, input_ids, use_cache):
            return type("Output", (), {"last_hidden_state": self.logits.expand(*input_ids.shape, -1)})

        def get_output_embeddings(self):
            head = torch.nn.Identity()
            head.weight = torch.empty(3, 1)
            return head

    for logits, T, expected in (([2.0, 0, 0], 0.5, -0.03598), ([1.0, -1], 2.0, -0.12693 - 0.18633), ([2.0, 0, 0], 1.0, -0.23954)):
        logps, entropy = L.token_logps(Fixed(logits), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 1, dtype=torch.long), T, True)
        p = (torch.tensor(logits) / T).softmax(-1)
        assert abs(logps.item() - expected) < 1e-5 and abs(entropy.item() + (p * p.log()).sum().item()) < 1e-6


# ------------------------------------------------------------------------------------------- rows and terms that must not count

def test_a_response_without_tokens_adds_nothing_to_gspo():
    logps, old = torch.tensor([[-1.0, -1], [-1, -1]], requires_grad=True), torch.tensor([[-1.2, -1.2], [-9, -9]])
    ids, A = torch.tensor([[1, 1], [0, 0]]), torch.tensor([1.0, 1.0])
    assert math.isclose(L.gspo_loss(logps, old, A, ids).item(), -min(math.exp(0.2), 1.2) / 2, rel_tol=1e-6)      # not -(1.2 + 1) / 2
    assert L.gspo_loss(logps, old, A * 0 + torch.tensor([0.0, 1]), ids).item() == 0


def test_old_and_reference_log_probabilities_carry_no_gradient():
    new, old = torch.full((2, 2), -1.0, requires_grad=True), torch.full((2, 2), -0.9, requires_grad=True)
    ids, A = torch.ones(2, 2, dtype=torch.long), torch.tensor([1.0, -1.0])
    for loss in (L.grpo_loss(new, old, A, ids, 2), L.gspo_loss(new, old, A, ids), L.llds_loss(new, old, A, ids), L.kl_penalty(new, old, ids),
                 L.log_ratio(new, old, ids > 0).sum(), L.token_displacement(new, old).sum()):
        assert torch.autograd.grad(loss, old, allow_unused=True, retain_graph=True)[0] is None and torch.autograd.grad(loss, new)[0].any()


def test_a_gate_at_exactly_zero_is_closed():
    old, new, ids = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -0.5]]), torch.tensor([[1, 1]])            # Delta = (.5, -.5)
    assert [L.llds_loss(new, old, torch.tensor([1.0]), ids, gate).item() for gate in ("action", "response", "token")] == [0, 0, 0.25]


def test_a_token_far_from_the_reference_has_a_finite_gradient():
    new = torch.tensor([[-300.0, -1.0]], requires_grad=True)
    L.kl_penalty(new, torch.tensor([[-1.0, -300.0]]), torch.tensor([[1, 1]])).backward()
    assert new.grad.isfinite().all()


def test_displacement_ignores_whatever_stands_on_feedback():
    new, old = torch.tensor([[-1.0, float("nan"), -2.0]]), torch.tensor([[-1.5, float("-inf"), -1.0]])
    assert L.action_displacement(new, old, torch.tensor([[1, 0, 2]])).tolist() == [[0.5, -1.0]]


def test_action_ids_from_mask():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 1, 1], [0] * 8])
    assert L.action_ids_from_mask(mask).tolist() == [[0, 1, 1, 0, 2, 0, 0, 3], [1, 0, 0, 0, 0, 0, 2, 2], [0] * 8]
