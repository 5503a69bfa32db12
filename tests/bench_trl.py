"""Times a training step against TRL's GRPOTrainer: same model, rollout size and updates, interleaved. Not a test.

    python tests/bench_trl.py [--pairs 5]        a line per case: seconds a step of both sides, their ratio and its spread

Cases: one turn at two sizes, and three turns with 60 tokens of tool feedback after each of the first two. In the last, TRL's
side generates from the whole context again each turn, as its tool loop does; ours keeps the key-value cache. Nothing ends
early, so both sample the same number of tokens. One thread. Needs trl 1.16, which the project itself does not.
"""
import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent)]
import llds_grpo as L                                                                                       # noqa: E402
from worlds import bpe_tokenizer                                                                            # noqa: E402

try:
    import trl
    from datasets import Dataset
except ImportError:
    sys.exit("this bench compares with trl, which is not installed: pip install trl==1.16.0")

SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, vocab_size=540)
LARGE = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=7, vocab_size=8192)
CASES = {"one turn, 0.4 M parameters, 160 x 32 tokens": (SMALL, 160, 32, 1), "one turn, 20 M parameters, 32 x 48 tokens": (LARGE, 32, 48, 1),
         "three turns, 0.4 M parameters, 160 x 3 x 32": (SMALL, 160, 32, 3), "three turns, 20 M parameters, 32 x 3 x 48": (LARGE, 32, 48, 3)}
FEEDBACK, PROMPT, UPDATES, GROUP = 60, 12, 4, 4


def make_model(shape):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=1024,
                                        bos_token_id=None, eos_token_id=None, pad_token_id=0, **shape))


class Endless:
    """A tokenizer whose texts never close a tag: prompts and feedback are runs of one id."""

    eos_token_id = chat_template = None
    encode = staticmethod(lambda text, add_special_tokens=True: [7] * (FEEDBACK if "Invalid" in text else PROMPT))
    decode = staticmethod(lambda ids: "")
    get_vocab = get_added_vocab = staticmethod(dict)


def ours(shape, rows, length, turns):
    """A function that makes one rollout and its updates."""
    cfg = dataclasses.replace(L.Config(), group_size=GROUP, questions_per_step=rows // GROUP, updates_per_rollout=UPDATES, chat="no", max_turns=turns - 1,
                              max_action_tokens=length, max_total_tokens=1024, rollout_batch=rows, microbatch_tokens=16384)
    policy, reference = make_model(shape), make_model(shape).requires_grad_(False)
    optimizer, generator = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True), torch.Generator().manual_seed(0)
    questions = [{"question": "q", "golden_answers": ["x"]}] * rows
    nothing = type("Nothing", (), {"search": lambda self, queries, topk: []})()
    return lambda step: L.train_step(step, policy, reference, Endless(), optimizer, generator, [], questions, nothing, cfg)


def theirs(shape, rows, length, turns, folder):
    """A trainer whose train() makes one rollout and its updates."""
    def rollout_func(prompts, trainer):
        prompt, completion, mask = [[7] * PROMPT] * len(prompts), [[] for _ in prompts], [[] for _ in prompts]
        for turn in range(turns):
            context = torch.tensor([p + c for p, c in zip(prompt, completion)])
            with torch.no_grad():
                new = trainer.model.generate(input_ids=context, attention_mask=torch.ones_like(context), do_sample=True, top_k=0, pad_token_id=0,
                                             max_new_tokens=length, min_new_tokens=length)[:, context.shape[1]:].tolist()
            feedback = [7] * FEEDBACK if turn + 1 < turns else []
            for c, m, ids in zip(completion, mask, new):
                c += ids + feedback
                m += [1] * len(ids) + [0] * len(feedback)
        return {"prompt_ids": prompt, "completion_ids": completion, "logprobs": None, "env_mask": mask}

    args = trl.GRPOConfig(output_dir=folder, per_device_train_batch_size=rows // UPDATES, steps_per_generation=UPDATES, num_generations=GROUP, beta=0.001,
                          max_completion_length=1000 if turns > 1 else length, learning_rate=1e-6, report_to=[], use_cpu=True, bf16=False, save_strategy="no",
                          logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, generation_kwargs={"min_new_tokens": length}, max_steps=UPDATES)
    reward = lambda completions, **_: [float(i % 2) for i in range(len(completions))]
    make_model(shape).save_pretrained(folder)                         # TRL loads its reference model from there
    return trl.GRPOTrainer(model=folder, args=args, processing_class=bpe_tokenizer(), reward_funcs=reward,
                           train_dataset=Dataset.from_list([{"prompt": "who wrote the harbour"}] * 4096),
                           **({"rollout_func": rollout_func} if turns > 1 else {}))


def main(pairs):
    torch.set_num_threads(1)
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer, step, ratios, seconds = theirs(*case, folder), ours(*case), [], ([], [])
            for pair in range(pairs + 1):                             # the first pair warms up and is not counted
                start = time.perf_counter()
                trainer.train()                                       # max_steps is one rollout's updates
                middle = time.perf_counter()
                step(pair)
                if pair:
                    for side, took in zip(seconds, (middle - start, time.perf_counter() - middle)):
                        side.append(took)
                    ratios.append(seconds[0][-1] / seconds[1][-1])
        slow, fast = map(statistics.median, seconds)
        print(f"{name}: TRL {slow:.2f} s, ours {fast:.2f} s, TRL / ours {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
              f"{pairs} pairs", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    main(parser.parse_args().pairs)
