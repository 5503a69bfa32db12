"""Small stand-ins for the tests: a byte-level BPE tokenizer whose tags split over tokens, tiny models, a scripted policy."""
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import llds_grpo as L

TEXT = ["who wrote the lighthouse of the violet harbour ? the answer is search information think",
        "doc 1 (title: harbour) the ferry crosses the harbour . </think>\n\n<search> ... ></ ?</ \"</ >. >, >< >\n"]
PASSAGES = [{"id": "0", "title": "Harbour", "text": "The violet harbour has a lighthouse ."},
            {"id": "1", "title": "Mill", "text": "The copper mill burnt down ."},
            {"id": "2", "title": "Ferry", "text": "A ferry crosses the harbour ."}]


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen2.5's habit of fusing '>' with what follows and '</' with what comes before."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")


def tiny_model(vocab: int, seed=0, cls=Qwen2ForCausalLM, **changes):
    torch.manual_seed(seed)
    config = Qwen2Config(**{**dict(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                   num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=None), **changes})
    return cls(config).eval()


class ScriptedPolicy:
    """Looks like a causal language model to rollout(), but row r writes the actions of scripts[r] (lists of token ids)."""

    def __init__(self, scripts, vocab):
        self.scripts, self.vocab, self.device = scripts, vocab, torch.device("cpu")
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.config = None
        self.read = [[] for _ in scripts]                          # the real tokens that each row was fed

    def forward(self, input_ids=None, cache=None):
        """Only its signature is looked at."""

    def get_output_embeddings(self):
        head = torch.nn.Identity()
        head.weight = torch.zeros(self.vocab, 1)
        return head

    def base_model(self, input_ids, attention_mask, position_ids, use_cache, cache):
        if not cache.layers:
            cache.layers.append(ScriptedLayer(len(input_ids)))
        layer, width = cache.layers[0], input_ids.shape[1]
        hidden = torch.zeros(*input_ids.shape, self.vocab)
        for b, row in enumerate(layer.rows):
            real = attention_mask[b, -width:].bool()
            assert position_ids[b][real].tolist() == list(range(len(self.read[row]), len(self.read[row]) + int(real.sum())))
            self.read[row] += input_ids[b][real].tolist()
            if width > 1 or layer.action[b] < 0:                   # a prompt or feedback came in: the next action begins
                layer.action[b], layer.offset[b] = layer.action[b] + 1, 0
            elif real.any():
                layer.offset[b] += 1
            script = self.scripts[row][layer.action[b]]
            hidden[b, :, script[min(layer.offset[b], len(script) - 1)]] = 50.0
        return SimpleNamespace(last_hidden_state=hidden)


class ScriptedLayer:
    """Stands where a layer's keys and values are, so that the rollout's own row selection is what picks the rows."""

    def __init__(self, rows):
        self.rows, self.action, self.offset = list(range(rows)), [-1] * rows, [0] * rows

    def batch_select_indices(self, indices):
        for name in ("rows", "action", "offset"):
            setattr(self, name, [getattr(self, name)[i] for i in indices.tolist()])


def config(**changes) -> L.Config:
    return L.Config(**{**dict(model="x", prompt="Q: {question}\n", max_action_tokens=60, max_feedback_tokens=80, max_total_tokens=600,
                              group_size=2, questions_per_step=2, updates_per_rollout=2, max_turns=2, chat="no", rollout_batch=8,
                              device="cpu", steps=2, save_every=2), **changes})
