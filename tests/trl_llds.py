"""LLDS in TRL's GRPOTrainer (trl 1.16). Set num_iterations >= 2, else TRL keeps no old log-probabilities."""
from trl import GRPOTrainer

from llds_grpo import action_ids_from_mask, llds_loss


class LLDSGRPOTrainer(GRPOTrainer):
    def __init__(self, *args, llds_lambda=0.2, llds_gate="action", **kwargs):
        super().__init__(*args, **kwargs)
        self.llds_lambda, self.llds_gate = llds_lambda, llds_gate

    def _masks(self, batch):
        written = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, T) 1 = written by the model
        return written, (written * (batch["advantages"] >= 0)[:, None]).sum()  # and the tokens of Y_pre

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        batch["llds_tokens"] = self.accelerator.gather(self._masks(batch)[1]).sum()  # whole batch
        return batch

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._policy_logps = outputs[0]  # the last call in a step is the policy's
        return outputs

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        old = inputs.get("old_per_token_logps")
        if old is None:  # TRL found the batch on-policy
            return loss
        written, kept = self._masks(inputs)
        action_ids = action_ids_from_mask(written)  # (B, T)
        llds = llds_loss(self._policy_logps, old, inputs["advantages"], action_ids, self.llds_gate)
        total = inputs["llds_tokens"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:  # one optimiser step's part of the batch
            total = total * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        llds = llds * kept / total  # micro-batch mean -> its share of the step
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["llds"].append(self.accelerator.gather(llds.detach()).mean().item())
        return loss + self.llds_lambda * llds
