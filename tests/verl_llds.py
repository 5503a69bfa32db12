"""LLDS as a policy loss of verl (0.9.1). Put this file and llds_grpo.py (with retriever.py) on PYTHONPATH, then

VERL_USE_EXTERNAL_MODULES=verl_llds python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    actor_rollout_ref.actor.policy_loss.loss_mode=grpo_llds \\
    actor_rollout_ref.actor.policy_loss._target_=verl_llds.LLDSPolicyLossConfig \\
    +actor_rollout_ref.actor.policy_loss.llds_lambda=0.2 ...

It acts from the second optimiser step on a rollout: train_batch_size above ppo_mini_batch_size, or ppo_epochs above 1.
"""
from dataclasses import dataclass

from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.workers.config import PolicyLossConfig

from llds_grpo import action_ids_from_mask, llds_loss


@dataclass
class LLDSPolicyLossConfig(PolicyLossConfig):
    llds_lambda: float = 0.2


@register_policy_loss("grpo_llds")
def grpo_llds(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
              rollout_is_weights=None):
    loss, metrics = get_policy_loss_fn("vanilla")(old_log_prob, log_prob, advantages, response_mask,
                                                  loss_agg_mode, config, rollout_is_weights)
    sign = (advantages * response_mask).sum(-1)  # (B,) verl's advantages are per token, 0 on tool tokens
    llds = llds_loss(log_prob, old_log_prob, sign, action_ids_from_mask(response_mask))
    info = config.global_batch_info
    if info.get("batch_num_tokens") is not None:  # losses are summed over micro-batches: divide by all tokens
        kept = (response_mask * (sign >= 0)[:, None]).sum()
        llds = llds * kept / info["batch_num_tokens"] * info.get("dp_size", 1)
    metrics["actor/llds"] = llds.detach().item()
    return loss + config.policy_loss.llds_lambda * llds, metrics
