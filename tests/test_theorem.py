"""Theorem 4.2 / A.1 as a test: how fast a right response gains likelihood under GRPO, on a softmax layer with given hidden states."""
import torch

import llds_grpo as L


def instantaneous_change(W, hidden, tokens, rewards):
    """d/ds ln pi(y_i) of each response under the gradient flow of Eq. 1 at ratio 1, by autograd.

    W (V, H) is the trained layer; hidden (G, T, H); tokens (G, T); rewards (G,) -> (G,).
    """
    W = W.clone().requires_grad_()
    logps = (hidden @ W.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]                  # (G, T)
    A = L.group_advantages(rewards[None])[0]                                                      # (G,)
    loss = L.grpo_loss(logps, logps.detach(), A, torch.ones_like(tokens), len(rewards))
    flow = -torch.autograd.grad(loss, W, retain_graph=True)[0]                                    # dW/ds
    return torch.stack([(torch.autograd.grad(row.sum(), W, retain_graph=True)[0] * flow).sum() for row in logps])


def theorem(W, hidden, tokens, rewards):
    """The same by Theorem A.1: -G_i / N, G_i = p- sum alpha- <h, h'> over wrong tokens - p+ sum alpha+ <h, h'> over right ones.

    alpha = <e_y - pi, e_y' - pi'>; p+ = A of the right responses, p- = -A of the wrong ones; N tokens in the group.
    """
    errors = torch.nn.functional.one_hot(tokens, len(W)) - (hidden @ W.T).softmax(-1)             # (G, T, V)
    alpha = torch.einsum("itv,jsv->itjs", errors, errors)                                         # (G, T, G, T)
    similarity = torch.einsum("ith,jsh->itjs", hidden, hidden)                                    # (G, T, G, T)
    influence = (alpha * similarity).sum((1, 3))                                                  # (G, G) of j on i
    A = L.group_advantages(rewards[None])[0]
    right = rewards > 0
    p_plus, p_minus = A[right][0], -A[~right][0]
    G = p_minus * influence[:, ~right].sum(1) - p_plus * influence[:, right].sum(1)
    return -G / tokens.numel()


def test_theorem_a1_equals_the_derivative():
    torch.manual_seed(0)
    for _ in range(20):
        W, hidden = torch.randn(7, 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
        tokens, rewards = torch.randint(0, 7, (4, 3)), torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)
        assert torch.allclose(instantaneous_change(W, hidden, tokens, rewards), theorem(W, hidden, tokens, rewards), atol=1e-6, rtol=0)


def test_it_equals_one_small_gradient_step():
    torch.manual_seed(1)
    W, hidden = torch.randn(7, 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64)
    tokens, rewards, step = torch.randint(0, 7, (4, 3)), torch.tensor([1.0, 0, 0, 1], dtype=torch.float64), 1e-6
    logps_of = lambda w: (hidden @ w.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    w = W.clone().requires_grad_()
    L.grpo_loss(logps_of(w), logps_of(w).detach(), L.group_advantages(rewards[None])[0], torch.ones_like(tokens), 4).backward()
    change = L.action_displacement(logps_of(W - step * w.grad), logps_of(W), torch.ones_like(tokens))[:, 0] / step          # Def. 4.1
    assert torch.allclose(change, theorem(W, hidden, tokens, rewards), atol=1e-4)


REWARDS = torch.tensor([1.0, 0.0], dtype=torch.float64)


def test_lazier_as_a_wrong_response_becomes_more_similar():
    # right (0, 1), wrong (0, 2): the wrong response begins with the right action, as in Sec. 5.4
    tokens, W = torch.tensor([[0, 1], [0, 2]]), torch.zeros(3, 4, dtype=torch.float64)
    unit = torch.eye(4, dtype=torch.float64)
    changes = []
    for cosine in torch.linspace(0, 1, 6, dtype=torch.float64):
        first = cosine * unit[0] + (1 - cosine ** 2).sqrt() * unit[3]
        hidden = torch.stack([torch.stack([unit[0], unit[1]]), torch.stack([first, unit[2]])])
        changes.append(instantaneous_change(W, hidden, tokens, REWARDS)[0].item())
    assert all(later < earlier for earlier, later in zip(changes, changes[1:]))


def test_lazier_as_a_wrong_response_becomes_less_likely():
    # one context, pi = (0.3, q, 0.7 - q), right token 0, wrong token 1: the change is (1 - 0.3 + q) / 2 by hand
    tokens, hidden = torch.tensor([[0], [1]]), torch.ones(2, 1, 1, dtype=torch.float64)
    changes = []
    for q in (0.6, 0.4, 0.2, 0.01):
        W = torch.tensor([[0.3], [q], [0.7 - q]], dtype=torch.float64).log()
        changes.append(instantaneous_change(W, hidden, tokens, REWARDS)[0].item())
        assert abs(changes[-1] - (0.7 + q) / 2) < 1e-12
    assert all(later < earlier for earlier, later in zip(changes, changes[1:]))
