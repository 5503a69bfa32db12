"""GRPO for a search agent, why it collapses, and the regulariser that cures it, in one file.

Reference implementation of "On Group Relative Policy Optimization Collapse in Agent Search: The Lazy Likelihood-
Displacement" (arXiv 2512.04220v2, ICML 2026). A language model answers questions with the help of a search engine and is
trained with GRPO. The likelihood of its right answers silently falls (Lazy Likelihood Displacement, LLD) until training
collapses; the paper's regulariser LLDS penalises exactly that fall.

    python llds_grpo.py                         # a tiny agent that ships with this file: laptop, minutes, no download
    python llds_grpo.py --model Qwen2.5-0.5B    # the real thing on one GPU

Symbols.  P questions, G responses each, B = P*G rows (a question's G rows are neighbours), T token positions,
K actions per response, V vocabulary entries, H hidden size.  Per-token tensors are (B, T) and shifted once: column t
belongs to the PREDICTED token input_ids[:, t + 1].

    paper                        tensor                     computed by               equation
    y_{i,t}, o_{i,t}             action_ids (B, T)          rollout                   Sec. 3: 0 = prompt or feedback, t+1 = action y_t
                                 from a 0/1 mask            action_ids_from_mask      the same, for other trainers
    r_i                          rewards (P, G)             exact_match               Sec. 3
    A_i                          advantages (B,)            group_advantages          Sec. 3
    ln pi(y_{i,t,k} | ...)       logps (B, T)               token_logps               Sec. 3
    J_GRPO                       scalar                     grpo_loss                 Eq. 1
    J_GSPO                       scalar                     gspo_loss                 Sec. 6.1
    D_KL                         scalar                     kl_penalty                App. B.2.1
    Delta_t                      (B, K)                     action_displacement       Def. 4.1, Eq. 2
    Delta(x)                     (P,)                       displacement_probe        Eq. 3
    Delta_{i,t,k}                (B, T)                     token_displacement        Sec. 5.5
    L_LLDS, L_LLDS-MA            scalar                     llds_loss                 Eq. 4, Eq. 5, Eq. 9, Eq. 10
    beta                         float                      answer_beta               App. B.2.1
    L_total                      scalar                     total_loss                Eq. 6
    death spiral                 phase and step             death_spiral              Def. A.3, Sec. 5.1

Departures.  From the paper where it leaves a choice or slips:
 1. Eq. 1 prints t = 1..T_i; actions run 0..T_i (as in Eq. 4), so all actions count.
 2. A group whose rewards are all equal, or of one response, has A = 0 exactly (0/0 in the paper).
 3. Log-ratios are clamped to +-80 before exp, far outside any healthy value, so that float32 cannot overflow.
 4. Y_pre and its token count are pooled over the mini-batch (Eq. 4 does not say over what).
 5. The k3 estimate of a token is bounded at 10, as in the official code (core_algos.py:392): it grows like an
    exponential, and one token that the policy has given up would drown every other gradient.
From the official code (github.com/vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-in-Search-R1, c19a094),
where it differs from the paper and we follow the paper:
 6. LLDS is divided by the action tokens of Y_pre, not of all responses (dp_actor.py:396).
 7. Losses are normalised once per mini-batch, not per micro-batch (dp_actor.py:296), so micro-batching changes no value.
 8. Advantages use the population standard deviation, not the sample one plus 1e-6 (core_algos.py:149).
 9. Eq. 1 averages tokens within each question, then questions; the code pools all tokens (core_algos.py:195).
10. Gates belong to recorded actions, not to runs of 1s in a mask, which merge neighbours (dp_actor.py:60).
11. The importance ratio is not clamped to 100 (core_algos.py:189), and there is no entropy bonus (dp_actor.py:346).
12. Sampled token ids are trained as sampled, never decoded and tokenised anew (generation.py:55-76).
13. The answer is read from the model's own actions, never from the prompt or from feedback (qa_em.py:73).
14. beta = min(V_s / 2, 1) counts executed searches; the code uses V_s - 1 and counts the unexecuted last one (dp_actor.py:361).
"""
from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import os
import re
import shutil
import string
import sys
import time
from bisect import bisect_right
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from retriever import BM25Retriever, HTTPRetriever, InputError, RetrieverError, load_corpus, load_hotpotqa, load_questions

# ================================================================================================================ config

PROMPT = """Answer the question at the end. Reason between <think> and </think> before every step, also after new \
information has come in. When you lack a fact, write a query between <search> and </search>: the best passages of a search \
engine come back between <information> and </information>. You may search several times. As soon as you know enough, write \
the answer alone, without explanation, between <answer> and </answer>.
Question: {question}
"""                                                       # no example answer: small models repeat it
INVALID = "\nInvalid action. Use <search> query </search> to search or <answer> answer </answer> to finish.\n"
TINY_DIR = Path(__file__).resolve().parent / "tests" / "tiny"


def knob(default, text):
    """A Config field whose help text is shown by --help."""
    return field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every number of a run. Defaults are for one GPU of 24 GB; "paper" values are from Sec. 6 and App. B.2.1."""
    model: str = knob("Qwen2.5-0.5B", "hub name (Qwen2.5-... means Qwen/Qwen2.5-...) or local folder; paper: 3B and 7B, base and instruct")
    data: str = knob("hotpotqa", "hub sets joined by + (nq+hotpotqa), or local .jsonl/.parquet files; paper: nq+hotpotqa")
    test_data: str = knob("", "what eval.py asks, in the same form; empty: the paper's seven benchmarks")
    corpus: str = knob("", "passages, .jsonl or .jsonl.gz; empty: HotpotQA's own paragraphs")
    retriever_url: str = knob("", "a Search-R1 retrieval server instead of a corpus; paper: E5 over the 2018 Wikipedia dump")
    hotpotqa_questions: int = knob(10_000, "how many of HotpotQA's questions to take where its own paragraphs are the corpus")
    out: str = knob("", "run folder; empty: a new one under runs/")
    steps: int = knob(500, "rollout steps; paper: 1005 scheduled, plotted to 500")
    seed: int = knob(0, "seed of question order and sampling")
    save_every: int = knob(50, "steps between checkpoints")
    device: str = knob("auto", "auto, cpu or cuda")
    # rollout
    prompt: str = knob(PROMPT, "text around {question}")
    chat: str = knob("auto", "use the chat template: yes, no, or auto (yes for -Instruct models)")
    group_size: int = knob(5, "G, responses per question; paper: 5")
    questions_per_step: int = knob(32, "P, questions per rollout step; paper: 512")
    max_turns: int = knob(3, "tool turns before the last action, which must answer; paper: 3")
    topk: int = knob(3, "passages per search; paper: 3")
    temperature: float = knob(1.0, "sampling temperature; paper: 1 (top-p 1)")
    max_action_tokens: int = knob(500, "tokens per action; paper: 500")
    max_feedback_tokens: int = knob(500, "tokens per feedback block; paper: 500")
    max_total_tokens: int = knob(4096, "tokens of prompt, actions and feedback together; paper: 4096")
    rollout_batch: int = knob(80, "rows sampled at a time; changes memory and speed")
    # objective
    objective: str = knob("grpo", "grpo (Eq. 1) or gspo (Sec. 6.1)")
    clip_eps: float = knob(0.2, "eps of Eq. 1; paper: 0.2")
    kl_coef: float = knob(0.001, "weight of the KL penalty to the initial model; paper: 0.001; 0 drops the reference model")
    llds_lambda: float = knob(0.2, "lambda of Eq. 6; paper: 0.2 (0.3 for 7B-Instruct); 0 is plain GRPO")
    gate: str = knob("action", "action (Eq. 4), response (Eq. 10) or token (Eq. 9)")
    answer_beta: str = knob("1", "beta of Eq. 5: a number, or adaptive (App. B.2.1); 1 is LLDS without masking")
    # optimisation
    updates_per_rollout: int = knob(4, "optimiser steps per rollout; paper: 10; LLDS needs at least 2")
    lr: float = knob(1e-6, "AdamW learning rate; paper: 1e-6")
    warmup_steps: int = knob(10, "rollout steps of linear warm-up; official: 28.5 %% of 1005")
    weight_decay: float = knob(0.01, "AdamW weight decay; official: 0.01")
    max_grad_norm: float = knob(1.0, "gradient clipping; official: 1.0")
    microbatch_tokens: int = knob(4096, "tokens per forward and backward pass; changes memory and speed, no value")
    gradient_checkpointing: bool = knob(False, "recompute activations in the backward pass: less memory, more time")

    def check(self) -> None:
        """Raises InputError for a setting that cannot work."""
        choices = {"gate": ("action", "response", "token"), "objective": ("grpo", "gspo"), "device": ("auto", "cpu", "cuda"),
                   "chat": ("auto", "yes", "no")}
        positive = ("lr", "clip_eps", "max_grad_norm", "temperature")
        not_negative = ("kl_coef", "llds_lambda", "weight_decay", "warmup_steps", "seed")
        for f in dataclasses.fields(self):
            value, option = getattr(self, f.name), "--" + f.name.replace("_", "-")
            if value not in choices.get(f.name, (value,)):
                raise InputError(f"{option} must be one of {', '.join(choices[f.name])}, not {value!r}")
            if f.name in positive and not 0 < value < float("inf"):
                raise InputError(f"{option} must be a number above 0, not {value}")
            if f.name in not_negative and not 0 <= value < float("inf"):
                raise InputError(f"{option} must be a number of at least 0, not {value}")
            if f.type == "int" and f.name not in not_negative and value < 1:
                raise InputError(f"{option} must be at least 1, not {value}")
        if self.questions_per_step % self.updates_per_rollout:
            raise InputError(f"--questions-per-step {self.questions_per_step} must be a multiple of --updates-per-rollout "
                             f"{self.updates_per_rollout}: a mini-batch holds whole groups")
        if self.llds_lambda and self.updates_per_rollout == 1:
            raise InputError("--llds-lambda above 0 needs --updates-per-rollout of at least 2: with one update per rollout the "
                             "old and the current policy are the same, Delta is 0 and LLDS never acts; use --llds-lambda 0 otherwise")
        if "{question}" not in self.prompt:
            raise InputError("--prompt must contain {question}")
        if self.answer_beta != "adaptive" and not re.fullmatch(r"0?\.\d+|0|1|1\.0*|0\.", self.answer_beta):
            raise InputError(f"--answer-beta must be a number from 0 to 1 or 'adaptive', not {self.answer_beta!r}")


# The second set of values: the stand-in world of tests/tiny, whose collapse takes minutes on a laptop.
TINY = Config(model=str(TINY_DIR), data=str(TINY_DIR / "train.jsonl"), test_data=str(TINY_DIR / "test.jsonl"),
              corpus=str(TINY_DIR / "corpus.jsonl"), steps=100, prompt="Question: {question}\n", max_action_tokens=32,
              max_feedback_tokens=64, max_total_tokens=320, rollout_batch=160, lr=1e-3, warmup_steps=50, weight_decay=0.0)


# ============================================================================================= protocol: prompt, actions

TAG = re.compile(r"</?(?:think|search|information|answer)>")
CLOSING = re.compile(r"</(search|answer)>")


@lru_cache
def control_text(tokenizer) -> re.Pattern:
    """Matches protocol tags and the tokenizer's added (special) tokens."""
    return re.compile("|".join([TAG.pattern, *map(re.escape, sorted(tokenizer.get_added_vocab(), key=len, reverse=True))]))


def plain(text: str, tokenizer) -> str:
    """`text` (a question or a passage) made harmless: no protocol tag, no special token, only encodable characters.

    Retrieved text can then neither close the information block nor become a control token. A tag or token is replaced by
    its letters between spaces, so that no new one can form around the gap.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    return control_text(tokenizer).sub(lambda match: f" {re.sub(r'[^a-z]+', ' ', match.group().lower()).strip()} ", text)


def encode_prompt(question: str, tokenizer, cfg: Config) -> list[int]:
    """Token ids of the prompt: the chat template for instruct models, the bare text for base models."""
    question = plain(question, tokenizer)
    question_ids = tokenizer.encode(question, add_special_tokens=False)
    if len(question_ids) > cfg.max_feedback_tokens:                    # [ours] an over-long question keeps its beginning
        question = tokenizer.decode(question_ids[:cfg.max_feedback_tokens])
    text = cfg.prompt.replace("{question}", question)
    if cfg.chat != "yes":
        return tokenizer.encode(text)
    chat = [{"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), add_special_tokens=False)


def parse_action(text: str) -> tuple[str, str]:
    """The action that the model wrote, as ("search", query), ("answer", answer) or ("invalid", "").

    The first closing tag decides, with the last opening tag of its kind before it. An empty query is invalid.
    """
    close = CLOSING.search(text)
    if close:
        kind = close.group(1)
        start = text.rfind(f"<{kind}>", 0, close.start())
        content = text[start + len(kind) + 2:close.start()].strip()
        if start >= 0 and (content or kind == "answer"):
            return kind, content
    return "invalid", ""


def encode_feedback(passages: list[dict], tokenizer, limit: int) -> list[int]:
    """Token ids of the <information> block, at most `limit` of them: the tail is cut, the closing tag never is.

    The block is encoded on its own and appended to the ids that were sampled; nothing sampled is tokenised again.
    """
    text = "\n".join(f"Doc {n} (Title: {plain(p['title'], tokenizer)}) {plain(p['text'][:20 * limit], tokenizer)}"
                     for n, p in enumerate(passages, 1)) or "No passage found."
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False)
    opening, body, closing = encode("\n\n<information>"), encode(text), encode("</information>\n\n")
    room = limit - len(opening) - len(closing)
    if room < 1:
        raise InputError(f"--max-feedback-tokens {limit} has no room for a passage; the tags alone take {limit - room}")
    if len(body) > room:
        body = body[:room]
        while body and tokenizer.decode(body).endswith("\ufffd"):        # never end within a character
            body.pop()
    return opening + body + closing


def normalize_answer(text: str) -> str:
    """SQuAD normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str | None, golden_answers: list[str]) -> float:
    """The reward r_i of Sec. 3: 1.0 if the answer equals any gold answer after normalisation, else 0.0.

    Where normalisation leaves nothing of the answer ("The The"), the lower-case text itself is compared.
    """
    if answer is None:
        return 0.0
    form = lambda text: normalize_answer(text) or text.lower().strip()
    return float(bool(answer.strip()) and any(form(answer) == form(gold) for gold in golden_answers))


# =============================================================================================================== rollout

@dataclass
class Trajectory:
    """One response: y_0, o_0, y_1, o_1, ..., y_T of Sec. 3. The three lists run over its tokens, the prompt's included."""
    question: dict
    ids: list[int]                                        # as fed and as sampled, never tokenised anew
    action_ids: list[int]                                 # 0 = prompt or feedback, t + 1 = token of action y_t
    answer_mask: list[bool]                               # token of the answer span, tags included
    turns: list[dict] = field(default_factory=list)       # {"action", "feedback"} as text
    valid: int = 0                                        # actions that were a search or an answer
    searches: int = 0                                     # searches that were executed
    first_docs: tuple | None = None                       # ids of the passages that the first search returned
    truncated: bool = False                               # an action or the whole trajectory hit a token limit
    answer: str | None = None
    reward: float = 0.0


class Context:
    """What the model has read so far: the key-value cache of b rows of unequal length, kept from turn to turn."""

    def __init__(self, model, rows: int):
        self.model, self.cache = model, DynamicCache(config=model.config)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"     # renamed in transformers 5.24
        self.mask = torch.zeros(rows, 0, dtype=torch.long, device=model.device)     # (b, S) 1 = real token

    def feed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Append ids (b, w), whose real tokens (mask 1) stand left; next-token logits (b, V) after each row's last one."""
        past = self.mask.sum(1, keepdim=True)                                       # (b, 1)
        self.mask = torch.cat([self.mask, mask], 1)                                 # (b, S + w)
        positions = past + torch.arange(ids.shape[1], device=ids.device)            # (b, w)
        hidden = self.model.base_model(input_ids=ids, attention_mask=self.mask, position_ids=positions, use_cache=True,
                                       **{self.cache_name: self.cache}).last_hidden_state  # (b, w, H)
        last = (mask.sum(1) - 1).clamp(min=0)                                       # (b,)
        return self.model.get_output_embeddings()(hidden[torch.arange(len(last)), last]).float()  # (b, V)

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask = self.mask[index]


class ActionEnd:
    """Tells when an action is complete: its text closes a search or an answer, or the model ended its turn (EOS)."""

    def __init__(self, model, tokenizer):
        self.tokenizer = tokenizer
        eos = [model.generation_config.eos_token_id, tokenizer.eos_token_id]
        self.eos = {i for ids in eos if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
        size = model.get_output_embeddings().weight.shape[0]
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        ends = [i in self.eos or (i < len(names) and names[i] is not None and ">" in names[i]) for i in range(size)]
        self.may_end = torch.tensor(ends, device=model.device)                      # (V,) only such tokens can complete a tag, however it is split

    def __call__(self, ids: list[int]) -> bool:
        return ids[-1] in self.eos or bool(CLOSING.search(self.tokenizer.decode(ids)))


def sample_actions(context, logits, limits, end, temperature, generator) -> list[list[int]]:
    """One action per row, token by token. limits: tokens allowed per row (>= 1). temperature 0 is greedy."""
    sampled = torch.full((len(limits), max(limits)), -1, device=logits.device)      # (b, most)
    limits = torch.tensor(limits, device=logits.device)                             # (b,)
    done = torch.zeros_like(limits, dtype=torch.bool)                               # (b,)
    for k in range(sampled.shape[1]):
        if temperature:                                                    # the full distribution: no top-k, no top-p
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]  # (b,)
        else:
            token = logits.argmax(-1)                                               # (b,)
        sampled[:, k] = token.masked_fill(done, -1)
        for row in (~done & end.may_end[token]).nonzero()[:, 0].tolist():
            if end(sampled[row, :k + 1].tolist()):
                done[row] = True
        done |= limits <= k + 1
        if done.all():
            break
        logits = context.feed(token[:, None], (~done[:, None]).long())                            # a finished row waits
    return [[token for token in row if token >= 0] for row in sampled.tolist()]


def answer_span(ids: list[int], tokenizer) -> tuple[int, int]:
    """First and last + 1 token of the last <answer>...</answer> in an action's ids, by bisection over decoded prefixes."""
    text = tokenizer.decode(ids)
    stop = text.index("</answer>") + len("</answer>")
    start = text.rindex("<answer>", 0, stop)
    length = lambda n: len(tokenizer.decode(ids[:n]))                      # characters of the first n tokens
    counts = range(len(ids) + 1)
    return bisect_right(counts, start, key=length) - 1, bisect_right(counts, stop - 1, key=length)


@torch.no_grad()
def rollout(model, tokenizer, questions, retriever, cfg, generator, temperature=None, max_turns=None) -> list[Trajectory]:
    """One trajectory per entry of `questions`, sampled in turns: y_0, o_0, y_1, ..., at most max_turns tool turns.

    After max_turns the last action must answer; a search in it is not executed. Raises InputError for non-finite logits.
    """
    temperature = cfg.temperature if temperature is None else temperature
    max_turns = cfg.max_turns if max_turns is None else max_turns
    rows, seen, end = [], {}, ActionEnd(model, tokenizer)
    for question in questions:
        ids = encode_prompt(question["question"], tokenizer, cfg)
        if len(ids) >= cfg.max_total_tokens:
            raise InputError(f"--max-total-tokens {cfg.max_total_tokens} has no room for an action: a prompt takes {len(ids)} tokens")
        rows.append(Trajectory(question, ids, [0] * len(ids), [False] * len(ids)))
    live, pending = rows, [row.ids for row in rows]            # pending: read next, not yet in the cache
    context = Context(model, len(rows))
    for turn in range(max_turns + 1):
        width = max(map(len, pending))
        ids = torch.tensor([p + [0] * (width - len(p)) for p in pending], device=model.device)  # (b, w)
        mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in pending], device=model.device)
        logits = context.feed(ids, mask)                                            # (b, V)
        if not logits.isfinite().all():
            raise InputError("the policy's logits are not finite: the checkpoint is damaged, load an earlier one")
        limits = [min(cfg.max_action_tokens, cfg.max_total_tokens - len(row.ids)) for row in live]
        actions = sample_actions(context, logits, limits, end, temperature, generator)
        kinds = [record_action(row, turn, action, limit, tokenizer, end) for row, action, limit in zip(live, actions, limits)]
        if turn == max_turns:
            break
        queries = list(dict.fromkeys(query for kind, query in kinds if kind == "search" and query not in seen))
        seen.update(zip(queries, retriever.search(queries, cfg.topk)))                 # each query once per rollout
        goes_on, pending = [], []
        for i, (row, action, (kind, query)) in enumerate(zip(live, actions, kinds)):
            feedback = [] if kind == "answer" else record_feedback(row, kind, seen.get(query), tokenizer, cfg)
            if feedback:
                goes_on.append(i)
                pending.append(action[-1:] + feedback)         # the last sampled token has not been read yet either
        if not goes_on:
            break
        if len(goes_on) < len(live):
            context.keep(goes_on)
            live = [live[i] for i in goes_on]
    for row in rows:
        row.reward = exact_match(row.answer, row.question["golden_answers"])
    return rows


def record_action(row, turn, ids, limit, tokenizer, end) -> tuple[str, str]:
    """Append a sampled action to its trajectory; returns parse_action's result."""
    text = tokenizer.decode(ids)
    kind, content = parse_action(text)
    span = range(*answer_span(ids, tokenizer)) if kind == "answer" else ()
    row.answer_mask += [k in span for k in range(len(ids))]
    row.action_ids += [turn + 1] * len(ids)
    row.ids = row.ids + ids
    row.turns.append({"action": text, "feedback": ""})
    row.truncated |= len(ids) == limit and not end(ids)
    row.valid += kind != "invalid"
    if kind == "answer":
        row.answer = content
    return kind, content


def record_feedback(row, kind, passages, tokenizer, cfg) -> list[int]:
    """Append o_t to a trajectory and return its ids, or [] where the token budget leaves no room for another action."""
    if kind == "search":
        feedback = encode_feedback(passages, tokenizer, cfg.max_feedback_tokens)
        row.searches += 1
        if row.first_docs is None:
            row.first_docs = tuple(p["id"] for p in passages)
    else:
        feedback = tokenizer.encode(INVALID, add_special_tokens=False)
    row.turns[-1]["feedback"] = tokenizer.decode(feedback)
    if len(row.ids) + len(feedback) >= cfg.max_total_tokens:
        row.truncated = True
        return []
    row.ids = row.ids + feedback
    row.action_ids += [0] * len(feedback)
    row.answer_mask += [False] * len(feedback)
    return feedback


# ===================================================================================================== log-probabilities

def token_logps(model, input_ids, action_ids, with_entropy=False, chunk=1024):
    """ln pi(token) at action tokens, 0 elsewhere: (logps, entropy), both (B, T) in float32; entropy in nats or None.

    input_ids (B, T + 1), right-padded; action_ids (B, T). Padding stands right of every action token and attention is
    causal, so no attention mask is needed. Only action tokens need logits: at V = 151,936 those of 4,096 tokens are 2.5 GB,
    so the head runs on `chunk` tokens at a time and its logits are recomputed in the backward pass.
    """
    hidden = model.base_model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state  # (B, T, H)
    chosen = action_ids > 0                                                         # (B, T), N of them
    head = model.get_output_embeddings()

    def score(h, target):                                                           # (n, H), (n,)
        logps = head(h).float().log_softmax(-1)                                     # (n, V)
        entropy = -(logps.exp() * logps).sum(-1) if with_entropy else None          # (n,)
        return logps.gather(-1, target[:, None])[:, 0], entropy                     # (n,)

    pieces = [checkpoint(score, h, target, use_reentrant=False) if torch.is_grad_enabled() else score(h, target)
              for h, target in zip(hidden[chosen].split(chunk), input_ids[:, 1:][chosen].split(chunk))]
    spread = lambda values: torch.zeros(chosen.shape, device=hidden.device).masked_scatter(chosen, torch.cat(values))  # (B, T)
    logps, entropies = zip(*pieces) if pieces else ([hidden.new_zeros(0).float()], [hidden.new_zeros(0).float()])
    return spread(logps), spread(entropies) if with_entropy else None


# ==================================================================================== Sec. 3: group advantage, GRPO, KL

def group_advantages(rewards):
    """Sec. 3: A_i = (r_i - mu) / sigma, with the mean and population standard deviation of the group's rewards.

    rewards (P, G) -> (P, G). Equal rewards, or G = 1, give exactly 0.
    """
    centred = rewards - rewards.mean(1, keepdim=True)                               # (P, G)
    sigma = centred.square().mean(1, keepdim=True).sqrt()                           # (P, 1)  [official: core_algos.py:149, sample std + 1e-6]
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)                        # (P, 1)  rounding must not make a signal
    return torch.where(equal, torch.zeros_like(centred), centred / sigma)           # (P, G)


def log_ratio(logps, old_logps, mask):
    """ln g = ln pi_theta - ln pi_old where mask is True, 0 elsewhere: (B, T). Masked before any arithmetic.

    Clamped to +-80 [ours], so that exp() and its gradient stay finite in float32.
    """
    new = torch.where(mask, logps, torch.zeros_like(logps))                         # (B, T)
    old = torch.where(mask, old_logps.detach(), torch.zeros_like(logps))            # (B, T)
    return (new - old).clamp(-80, 80)                                               # (B, T)


def grpo_loss(logps, old_logps, advantages, action_ids, group_size, clip_eps=0.2):
    """Eq. 1 negated: L = -mean over questions of 1/sum_i|y_i| sum_{i,t,k} min(g A_i, clip(g, 1-eps, 1+eps) A_i).

    logps, old_logps, action_ids (B, T); advantages (B,); rows of a question are neighbours -> scalar. Needs log_ratio.
    """
    mask = action_ids > 0                                                           # (B, T)  the feedback mask
    ratio = log_ratio(logps, old_logps, mask).exp()                                 # (B, T)  g_{i,t,k}
    A = advantages[:, None]                                                         # (B, 1)
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A) * mask  # (B, T)  [official: core_algos.py:189 clamps g to 100]
    tokens = mask.reshape(-1, group_size * mask.shape[1]).sum(1).clamp(min=1)       # (P,)    one count per question
    J = surrogate.reshape(-1, group_size * mask.shape[1]).sum(1) / tokens           # (P,)    [official: core_algos.py:195 pools all tokens]
    return -J.mean()


def gspo_loss(logps, old_logps, advantages, action_ids, clip_eps=0.2):
    """Sec. 6.1 (GSPO): L = -mean_i min(s_i A_i, clip(s_i, 1-eps, 1+eps) A_i), s_i = exp(mean over tokens of ln g).

    logps, old_logps, action_ids (B, T); advantages (B,) -> scalar. A response without tokens adds 0. Needs log_ratio.
    """
    mask = action_ids > 0                                                           # (B, T)
    mean = log_ratio(logps, old_logps, mask).sum(1) / mask.sum(1).clamp(min=1)      # (B,)
    ratio = mean.exp()                                                              # (B,)    s_i
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)  # (B,)
    return -(surrogate * mask.any(1)).mean()


def kl_penalty(logps, ref_logps, action_ids):
    """App. B.2.1: the k3 estimate of KL(pi_theta || pi_ref), mean over action tokens of exp(d) - d - 1, d = ln pi_ref - ln pi_theta.

    logps, ref_logps, action_ids (B, T) -> scalar from 0 to 10.
    """
    mask = action_ids > 0                                                           # (B, T)
    d = torch.where(mask, ref_logps.detach() - logps, torch.zeros_like(logps)).clamp(-80, 80)  # (B, T)
    k3 = (d.exp() - d - 1).clamp(max=10)                                            # (B, T)  [official: core_algos.py:392, the same bound]
    return (k3 * mask).sum() / mask.sum().clamp(min=1)


# ============================================================================== Sec. 4: Lazy Likelihood Displacement (LLD)

def action_displacement(logps, old_logps, action_ids):
    """Def. 4.1: d_t = ln pi_fin(y_t | ...) - ln pi_old(y_t | ...), summed over the tokens of each action.

    logps, old_logps, action_ids (B, T) -> (B, K), 0 for an action that a row does not have. LLD: d_t <= eps.
    For the whole response (Eq. 2) sum over the last axis.
    """
    change = torch.where(action_ids > 0, logps - old_logps, torch.zeros_like(logps))  # (B, T)
    sums = change.new_zeros(len(change), int(action_ids.max()) + 1)                 # (B, K + 1), column 0: feedback
    return sums.scatter_add(1, action_ids, change)[:, 1:]                           # (B, K)


def action_ids_from_mask(mask):
    """Sec. 3: action ids for trainers that only keep a 0/1 mask of model-written tokens: 0 outside, 1..K for the k-th run of 1s.

    mask (B, T) -> (B, T). Limit: two actions with no feedback token between them become one, and share one gate of Eq. 4.
    """
    mask = mask.bool()                                                              # (B, T)
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))                          # (B, T)  the token to the left
    return (mask & ~before).cumsum(1) * mask                                        # (B, T)


def displacement_probe(groups, logps_of, loss_of, optimizer):
    """Eq. 3: Delta(x) = 1/N+ sum_{i right} sum_{t,k} [ln pi'(y_{i,t,k}) - ln pi(y_{i,t,k})] after one update on question x alone.

    groups: one dict per question with rewards (G,) and action_ids (G, T); logps_of(group) -> (G, T) with gradient;
    loss_of(logps, group) -> scalar; optimizer holds the policy's parameters. Every update starts from the same weights and
    optimiser state, which are restored. Returns one float per group, None where all rewards are equal.
    """
    from copy import deepcopy
    params = [p for g in optimizer.param_groups for p in g["params"]]
    weights, state = [p.detach().clone() for p in params], deepcopy(optimizer.state_dict())
    deltas = []
    for group in groups:
        right = group["rewards"] > 0                                                # (G,)
        if right.all() or not right.any():
            deltas.append(None)
            continue
        optimizer.zero_grad()
        before = logps_of(group)                                                    # (G, T)
        loss_of(before, group).backward()
        optimizer.step()
        with torch.no_grad():
            change = (logps_of(group) - before) * (group["action_ids"] > 0)         # (G, T)
            deltas.append(change[right].sum().item() / int(right.sum()))
            for p, w in zip(params, weights):
                p.copy_(w)
        optimizer.load_state_dict(deepcopy(state))
    optimizer.zero_grad()
    return deltas


# =========================================================================================================== Sec. 5: LLDS

def token_displacement(logps, old_logps):
    """Sec. 5.5: Delta_{i,t,k} = ln pi_old(token) - ln pi_theta(token); positive = the token lost likelihood.

    logps, old_logps (B, T) -> (B, T). The sign is opposite to Def. 4.1's.
    """
    return old_logps.detach() - logps                                               # (B, T)


def llds_loss(logps, old_logps, advantages, action_ids, gate="action", answer_mask=None, beta=1.0):
    """Eq. 4: L = 1/(sum_{i in Y_pre} sum_t |y_it|) sum_{i in Y_pre} sum_t 1[sum_k Delta > 0] sum_k max(0, Delta).

    gate "action" is Eq. 4, "response" Eq. 10 (one indicator over the whole response), "token" Eq. 9 (none). Eq. 5 (LLDS-MA):
    beta weighs max(0, Delta) where answer_mask (B, T) is True; the gate stays unweighted. Y_pre: responses with A_i >= 0.
    logps, old_logps, action_ids (B, T); advantages (B,) -> scalar. Needs token_displacement.
    Raises ValueError for an unknown gate.
    """
    kept = (action_ids > 0) & (advantages >= 0)[:, None]                            # (B, T)  tokens of Y_pre
    delta = torch.where(kept, token_displacement(logps, old_logps), torch.zeros_like(logps))  # (B, T)
    with torch.no_grad():                                                           # [official: dp_actor.py:390 leaks gradient]
        if gate == "action":
            sums = delta.new_zeros(len(delta), int(action_ids.max()) + 1).scatter_add(1, action_ids, delta)  # (B, K + 1)
            opened = (sums > 0).gather(1, action_ids)                               # (B, T)  Eq. 4
        elif gate == "response":
            opened = delta.sum(1, keepdim=True) > 0                                 # (B, 1)  Eq. 10
        elif gate == "token":
            opened = torch.ones_like(kept)                                          # (B, T)  Eq. 9
        else:
            raise ValueError(f"gate must be action, response or token, not {gate!r}")
        weight = opened.to(delta.dtype)                                             # (B, T) or (B, 1)
        if answer_mask is not None:
            weight = weight * (1 - (1 - beta) * answer_mask.to(delta.dtype))        # (B, T)  Eq. 5: beta on the answer
    penalty = torch.relu(delta) * weight                                            # (B, T)  relu: slope 0 at Delta = 0
    return penalty.sum() / kept.sum().clamp(min=1)                                  # [official: dp_actor.py:396 counts all responses]


def answer_beta(mean_searches, v_base=2.0):
    """App. B.2.1: beta = min(V_s / V_B, 1), V_s the mean number of executed searches per trajectory. float -> float."""
    return min(mean_searches / v_base, 1.0)                                         # [official: dp_actor.py:361, V_s - 1]


def death_spiral(history, window=10):
    """Sec. 5.1, Def. A.3: the phase that a run is in, from its metrics (a list of dicts, one per step, in order).

    With l and r the means of logp_right and reward over the last `window` steps [ours: the paper gives no thresholds]:
    II, steady decay: l is below its best by 0.02 nats per token and by half of |best|, since it last was near its best.
    III, acceleration: from then on the first step where l fell by 0.1 within a window while r is below its best.
    I, early stagnation: neither, but r rises while l does not. 0: none of them.
    Returns {"phase": 0 to 3, "since": first step or None, "spans": [(name, first step, last step)], "text": a sentence}.
    """
    def smooth(key):
        means, last = [], 0.0
        for i in range(len(history)):
            values = [row[key] for row in history[max(0, i - window + 1):i + 1] if row[key] is not None]
            last = sum(values) / len(values) if values else last              # no right response: the last known value
            means.append(last)
        return means
    if len(history) < 2 * window:
        return {"phase": 0, "since": None, "spans": [], "text": f"too short to judge: the phases need {2 * window} steps"}
    l, r, steps = smooth("logp_right"), smooth("reward"), range(window - 1, len(history))
    best, end = max(l[i] for i in steps), len(history) - 1
    fall = max(0.02, 0.5 * abs(best))
    if best - l[end] <= fall:
        if r[end] > r[window - 1] and l[end] <= l[window - 1] + 0.1 * abs(l[window - 1]):
            return {"phase": 1, "since": 0, "spans": [], "text": "phase I, early stagnation: the reward rises, the likelihood of right responses does not"}
        return {"phase": 0, "since": None, "spans": [], "text": "no death spiral: the likelihood of right responses has not fallen"}
    second = max(i for i in steps if l[i] >= best - fall / 4)
    third = next((i for i in steps if i > second and l[i - window] - l[i] > 0.1 and r[i] < max(r[window - 1:i])), None)
    if third is None:
        return {"phase": 2, "since": second, "spans": [("II", second, end)],
                "text": f"phase II, steady decay, since step {second}: the log-likelihood of right responses fell from {best:.3f} to {l[end]:.3f} per token"}
    return {"phase": 3, "since": third, "spans": [("II", second, third), ("III", third, end)],
            "text": f"phase III, acceleration, since step {third} (decay since step {second}): the log-likelihood of right responses fell "
                    f"from {best:.3f} to {l[end]:.3f} per token, the reward is {r[end]:.3f}, at best {max(r[window - 1:]):.3f}"}


# ======================================================================================================== training step

def total_loss(cfg, logps, batch, beta):
    """Eq. 6: L_total = L_GRPO + lambda * L_LLDS(-MA), plus the KL penalty of App. B.2.1. Returns (total, {term: value})."""
    old, advantages, action_ids = batch["old_logps"], batch["advantages"], batch["action_ids"]  # (B, T), (B,), (B, T)
    if cfg.objective == "grpo":
        loss = grpo_loss(logps, old, advantages, action_ids, cfg.group_size, cfg.clip_eps)
    else:
        loss = gspo_loss(logps, old, advantages, action_ids, cfg.clip_eps)
    llds = llds_loss(logps, old, advantages, action_ids, cfg.gate, batch["answer_mask"], beta)
    kl = kl_penalty(logps, batch["ref_logps"], action_ids) if cfg.kl_coef else torch.zeros(())
    return loss + cfg.llds_lambda * llds + cfg.kl_coef * kl, {"llds": llds.detach(), "kl": kl.detach()}


def make_minibatches(trajectories, cfg, device) -> list[dict]:
    """The tensors of a rollout, cut into updates_per_rollout mini-batches of whole groups."""
    rewards = torch.tensor([t.reward for t in trajectories]).view(-1, cfg.group_size)  # (P, G)
    advantages = group_advantages(rewards).flatten()                                # (P * G,)
    size = len(trajectories) // cfg.updates_per_rollout
    minibatches = []
    for start in range(0, len(trajectories), size):
        rows = trajectories[start:start + size]
        length = max(len(row.ids) for row in rows)
        pad = lambda lists, fill: torch.tensor([x + [fill] * (length - len(x)) for x in lists], device=device)
        minibatches.append({
            "input_ids": pad([row.ids for row in rows], 0),                         # (B, T + 1)
            "action_ids": pad([row.action_ids for row in rows], 0)[:, 1:],          # (B, T)  shifted once, here
            "answer_mask": pad([row.answer_mask for row in rows], False)[:, 1:],    # (B, T)
            "advantages": advantages[start:start + size].to(device),                # (B,)
            "microbatches": microbatches([len(row.ids) for row in rows], cfg.microbatch_tokens)})
    return minibatches


def microbatches(lengths: list[int], max_tokens: int) -> list[tuple[list[int], int]]:
    """Rows of similar length together: [(row numbers, tokens of the longest)], each at most max_tokens with its padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups = []
    for i in order:
        if groups and lengths[i] > 0.8 * groups[-1][1] and (len(groups[-1][0]) + 1) * groups[-1][1] <= max_tokens:
            groups[-1][0].append(i)
        else:
            groups.append(([i], lengths[i]))
    return groups


def autocast(device):
    """bf16 compute on CUDA; the weights stay float32, since bf16 weights would swallow Adam steps of 1e-6."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def microbatch_logps(model, batch, rows, length, with_entropy=False):
    """token_logps of some rows of a mini-batch, computed on their own length and padded back to T: two (b, T) or None."""
    with autocast(batch["input_ids"].device):
        outputs = token_logps(model, batch["input_ids"][rows, :length], batch["action_ids"][rows, :length - 1], with_entropy)
    T = batch["action_ids"].shape[1]
    return [None if x is None else torch.nn.functional.pad(x, (0, T - x.shape[1])) for x in outputs]


@torch.no_grad()
def minibatch_logps(model, batch, with_entropy=False):
    """Log-probabilities (B, T) of a whole mini-batch under `model`, by the training pass's own micro-batches."""
    logps = torch.zeros(batch["action_ids"].shape, device=batch["input_ids"].device)  # (B, T)
    entropy = torch.zeros_like(logps)                                               # (B, T)
    for rows, length in batch["microbatches"]:
        logps[rows], e = microbatch_logps(model, batch, rows, length, with_entropy)
        if with_entropy:
            entropy[rows] = e
    return logps, entropy


def update(policy, optimizer, batch, cfg, beta) -> dict:
    """One optimiser step on a mini-batch. Returns its metrics; a loss or gradient that is not finite skips the step.

    Every term of Eq. 6 is a sum over rows divided by counts that do not depend on the policy. The gradient of some rows is
    therefore that of the whole mini-batch's loss with the other rows held constant: micro-batches change no value.
    """
    optimizer.zero_grad()
    policy.train()                                                         # checkpointing needs it; dropout is 0 throughout
    logps = batch["old_logps"].clone()                                              # (B, T)
    for rows, length in batch["microbatches"]:
        new, _ = microbatch_logps(policy, batch, rows, length)                      # (b, T)
        index = torch.tensor(rows, device=logps.device)
        loss, _ = total_loss(cfg, logps.index_copy(0, index, new), batch, beta)
        loss.backward()
        logps[rows] = new.detach()
    loss, terms = total_loss(cfg, logps, batch, beta)                      # the mini-batch's own value, all rows in place
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
    healthy = bool(norm.isfinite() and loss.isfinite())
    if healthy:
        optimizer.step()
    mask, kept = batch["action_ids"] > 0, batch["advantages"] >= 0                  # (B, T), (B,)
    ratio = log_ratio(logps, batch["old_logps"], mask).exp()                        # (B, T)
    A = batch["advantages"][:, None]                                                # (B, 1)
    clipped = mask & (((A > 0) & (ratio > 1 + cfg.clip_eps)) | ((A < 0) & (ratio < 1 - cfg.clip_eps)))  # (B, T)
    opened = action_displacement(logps, batch["old_logps"], batch["action_ids"])[kept] < 0  # (B_pre, K)
    n_actions = batch["action_ids"][kept].amax(1).sum() if kept.any() else torch.zeros(())
    return {"loss": loss.item(), "llds": terms["llds"].item(), "kl": terms["kl"].item(), "grad_norm": norm.item(),
            "ratio_max": ratio.max().item(), "clip_fraction": (clipped.sum() / mask.sum().clamp(min=1)).item(),
            "gate_open": (opened.sum() / n_actions.clamp(min=1)).item(), "skipped": int(not healthy)}


# =============================================================================================================== metrics

def mean(values) -> float | None:
    """Mean of a list of numbers; None (null in metrics.jsonl) where there is nothing to average."""
    return sum(values) / len(values) if values else None


def rollout_metrics(trajectories, minibatches, cfg) -> dict:
    """What Figs. 2, 4, 5 and 9 plot, from one rollout and the old policy's log-probabilities and entropy at it."""
    logps = [row[ids > 0] for batch in minibatches for row, ids in zip(batch["old_logps"], batch["action_ids"])]
    steps = [ids[ids > 0] for batch in minibatches for ids in batch["action_ids"]]
    metrics = {"reward": mean([t.reward for t in trajectories])}
    for name, wanted in (("right", True), ("wrong", False)):                                      # Figs. 2 and 9a, then 5
        chosen = [i for i, t in enumerate(trajectories) if (t.reward > 0) == wanted]
        metrics[f"logp_{name}"] = mean(torch.cat([logps[i] for i in chosen]).tolist()) if chosen else None
        for k in range(1, cfg.max_turns + 2):
            metrics[f"logp_{name}_action{k}"] = mean([x for i in chosen for x in logps[i][steps[i] == k].tolist()])
    groups = [trajectories[i:i + cfg.group_size] for i in range(0, len(trajectories), cfg.group_size)]
    matches = [t.first_docs is not None and any(t.first_docs == right.first_docs for right in group if right.reward > 0)
               for group in groups if any(right.reward > 0 for right in group) for t in group if t.reward == 0]
    actions = sum(len(t.turns) for t in trajectories)
    tokens = sum(map(len, steps))
    return {**metrics,
            "entropy": sum(batch["entropy"].sum().item() for batch in minibatches) / max(tokens, 1),
            "action_tokens": tokens / actions, "searches": mean([t.searches for t in trajectories]),
            "valid_actions": sum(t.valid for t in trajectories) / actions, "match_ratio": mean(matches),
            "zero_groups": mean([float(len({t.reward for t in group}) == 1) for group in groups]),
            "truncated": mean([float(t.truncated) for t in trajectories])}


# =========================================================================================================== model and files

def hub_name(model: str) -> str:
    """Qwen2.5-0.5B -> Qwen/Qwen2.5-0.5B; a folder or a full hub name stays as it is."""
    return f"Qwen/{model}" if model.startswith("Qwen") and "/" not in model and not Path(model).is_dir() else model


def load_policy(model: str, device, trainable=True):
    """A causal language model with float32 weights and no dropout (old and new log-probabilities must agree exactly).

    Raises InputError for a checkpoint that is missing, damaged or not a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        for key, value in vars(config).items():
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        policy, report = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32, use_safetensors=True,
                                                              output_loading_info=True)
    except Exception as error:                                    # whatever the library raises, the checkpoint is the cause
        raise InputError(f"cannot load the model {model}: {str(error).strip().splitlines()[0]}") from None
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        raise InputError(f"cannot load the model {model}: {len(wrong)} weights do not fit its config, the first is {wrong[0]}")
    return policy.to(device).requires_grad_(trainable)


def load_tokenizer(model: str):
    """tokenizer.json as it is written; AutoTokenizer would rebuild its rules from the model's architecture."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(model)
    except Exception as error:                                    # as above
        raise InputError(f"cannot load the tokenizer of {model}: {str(error).strip().splitlines()[0]}") from None


def resolve(cfg, tokenizer) -> torch.device:
    """The device; and cfg.chat settled to yes or no."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device; use --device cpu")
    if cfg.chat == "auto":
        cfg.chat = "yes" if "instruct" in cfg.model.lower() else "no"
    if not tokenizer.chat_template:
        cfg.chat = "no"
    return torch.device("cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu")


def load_task(cfg) -> tuple[list[dict], object]:
    """The questions and the retriever of a run."""
    if cfg.data == "hotpotqa" and not cfg.corpus and not cfg.retriever_url:
        questions, passages = load_hotpotqa(cfg.hotpotqa_questions, cfg.seed)
        return questions, BM25Retriever(passages)
    questions = load_questions(cfg.data)
    return questions, load_retriever(cfg)


def load_retriever(cfg):
    if cfg.retriever_url:
        return HTTPRetriever(cfg.retriever_url)
    if not cfg.corpus:
        raise InputError(f"--data {cfg.data} brings no passages of its own: give --corpus FILE or --retriever-url URL")
    if not Path(cfg.corpus).is_file():
        raise InputError(f"--corpus {cfg.corpus}: there is no such file")
    return BM25Retriever(load_corpus(cfg.corpus))


def save_checkpoint(out: Path, step: int, policy, tokenizer, optimizer, generator) -> None:
    """out/checkpoint-STEP: the policy in the Hugging Face layout (safetensors) and trainer.pt (optimiser, step, RNG state).

    Written under a temporary name and renamed, so that a checkpoint is whole or absent. trainer.pt, twice the size of the
    weights, is kept in the two newest only.
    """
    folder, temporary = out / f"checkpoint-{step}", out / "checkpoint.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        policy.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        torch.save({"step": step, "optimizer": optimizer.state_dict(), "generator": generator.get_state()}, temporary / "trainer.pt")
    except (OSError, RuntimeError, SafetensorError) as error:              # a full disk raises any of the three
        raise InputError(f"cannot write {folder}, the checkpoints before it are kept: {error}") from None
    if folder.exists():                                          # left by the run that this one resumes
        shutil.rmtree(folder)
    os.replace(temporary, folder)
    for old in checkpoints(out)[:-2]:
        (old / "trainer.pt").unlink(missing_ok=True)


def checkpoints(out: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted(Path(out).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))


def write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def questions_of_step(questions: list[dict], step: int, cfg) -> list[dict]:
    """The P questions of a step: a seeded shuffle per epoch, a function of the step alone, so that resuming needs no state."""
    numbers = range(step * cfg.questions_per_step, (step + 1) * cfg.questions_per_step)
    orders = {epoch: torch.randperm(len(questions), generator=torch.Generator().manual_seed(cfg.seed * 100_003 + epoch))
              for epoch in {n // len(questions) for n in numbers}}
    return [questions[orders[n // len(questions)][n % len(questions)]] for n in numbers]


# ========================================================================================================== training loop

def train(cfg: Config, resume: Path | None = None) -> Path:
    """Run GRPO (+ LLDS) and return the run's folder: config.json, metrics.jsonl, checkpoint-STEP/."""
    cfg.check()
    out = resume or run_folder(cfg)
    start = next(reversed(checkpoints(out)), None) if resume else None     # a run killed before its first one starts again
    tokenizer = load_tokenizer(hub_name(cfg.model))
    device = resolve(cfg, tokenizer)
    policy = load_policy(str(start) if start else hub_name(cfg.model), device)
    reference = load_policy(hub_name(cfg.model), device, trainable=False) if cfg.kl_coef else None
    if cfg.gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    questions, retriever = load_task(cfg)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "config.json", json.dumps(dataclasses.asdict(cfg), indent=1))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(cfg.seed)
    history, first = [], 0
    if start:
        state = torch.load(start / "trainer.pt", weights_only=True, map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        first = state["step"]
        history = [row for row in read_metrics(out) if row["step"] < first]
    write_atomic(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in history))
    warned = death_spiral(history)["phase"] >= 2
    bar = tqdm(range(first, cfg.steps), initial=first, total=cfg.steps, desc=out.name)
    try:
        for step in bar:
            row = train_step(step, policy, reference, tokenizer, optimizer, generator, questions, retriever, cfg)
            history.append(row)
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            bar.set_postfix({k: "-" if row[k] is None else f"{row[k]:.3g}" for k in ("reward", "logp_right", "entropy", "grad_norm")})
            if row["skipped"]:
                bar.write(f"step {step}: {row['skipped']} of {cfg.updates_per_rollout} updates skipped: loss or gradient not finite")
            spiral = death_spiral(history)
            if spiral["phase"] >= 2 and not warned:                                # App. D: the reward alone is a late signal
                bar.write(f"warning: {spiral['text']}")
                warned = True
            if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
                save_checkpoint(out, step + 1, policy, tokenizer, optimizer, generator)
    except BaseException:                                         # Ctrl-C, a dead retrieval server, a full disk
        bar.close()
        print(f"stopped at step {len(history)}; continue with: python {Path(sys.argv[0]).name} --resume {out}", file=sys.stderr)
        raise
    print(summary(history, out))
    return out


def train_step(step, policy, reference, tokenizer, optimizer, generator, questions, retriever, cfg) -> dict:
    """One rollout and its updates: sample, reward, advantage, old log-probabilities, then updates_per_rollout steps of Eq. 6."""
    clock = [time.perf_counter()]
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * min(1.0, (step + 1) / cfg.warmup_steps) if cfg.warmup_steps else cfg.lr
    chosen = [q for q in questions_of_step(questions, step, cfg) for _ in range(cfg.group_size)]  # G neighbours per question
    trajectories = []
    policy.eval()                                                 # with checkpointing, train mode would drop the cache
    for i in range(0, len(chosen), cfg.rollout_batch):
        with autocast(policy.device):
            trajectories += rollout(policy, tokenizer, chosen[i:i + cfg.rollout_batch], retriever, cfg, generator)
    clock.append(time.perf_counter())
    minibatches = make_minibatches(trajectories, cfg, policy.device)
    for batch in minibatches:                    # before any update, by the same code as the training pass: Delta starts at 0
        batch["old_logps"], batch["entropy"] = minibatch_logps(policy, batch, with_entropy=True)
        if reference is not None:
            batch["ref_logps"], _ = minibatch_logps(reference, batch)
    clock.append(time.perf_counter())
    metrics = rollout_metrics(trajectories, minibatches, cfg)
    beta = answer_beta(metrics["searches"]) if cfg.answer_beta == "adaptive" else float(cfg.answer_beta)
    updates = [update(policy, optimizer, batch, cfg, beta) for batch in minibatches]
    clock.append(time.perf_counter())
    for name in ("loss", "llds", "kl", "clip_fraction", "gate_open"):
        metrics[name] = mean([u[name] for u in updates])
    metrics["grad_norm"] = max(u["grad_norm"] for u in updates)
    metrics["ratio_max"] = max(u["ratio_max"] for u in updates)
    metrics["skipped"] = sum(u["skipped"] for u in updates)
    tokens = sum(sum(a > 0 for a in t.action_ids) for t in trajectories)
    seconds = [after - before for before, after in zip(clock, clock[1:])]
    row = {"step": step, **metrics, "beta": beta, "lr": optimizer.param_groups[0]["lr"], "tokens_per_second": tokens / sum(seconds),
           "seconds_rollout": seconds[0], "seconds_logps": seconds[1], "seconds_update": seconds[2]}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}   # JSON knows no nan


def read_metrics(out: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; a last line torn by a crash is left out."""
    text = (Path(out) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def run_folder(cfg) -> Path:
    """--out, or a new folder under runs/ that names the model, the objective and the seed."""
    if cfg.out:
        if (Path(cfg.out) / "metrics.jsonl").exists():
            raise InputError(f"--out {cfg.out} already holds a run; continue it with --resume {cfg.out}, or choose another folder")
        return Path(cfg.out)
    base = Path("runs") / f"{Path(cfg.model).name}-{cfg.objective}-lambda{cfg.llds_lambda:g}-seed{cfg.seed}"
    candidates = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(folder for folder in candidates if not folder.exists())


def summary(history: list[dict], out: Path) -> str:
    """The end of a run in words."""
    n = min(10, len(history))
    reward = lambda rows: mean([row["reward"] for row in rows])
    return (f"reward {reward(history[:n]):.3f} over the first {n} steps, {reward(history[-n:]):.3f} over the last {n}\n"
            f"{death_spiral(history)['text']}\n"
            f"files: {out}/metrics.jsonl, {out}/config.json, {checkpoints(out)[-1]}\n"
            f"next: python eval.py {out}")


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one sentence instead of the whole usage."""

    def error(self, message):
        raise InputError(f"{message}; see --help")


def as_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def parse_args(argv=None) -> tuple[Config, Path | None]:
    """The command line, made from Config: (config, run folder to resume or None)."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    for f in dataclasses.fields(Config):
        kind = {"bool": as_bool, "int": int, "float": float, "str": str}[f.type]
        extra = {"nargs": "?", "const": True} if f.type == "bool" else {}
        parser.add_argument("--" + f.name.replace("_", "-"), type=kind, default=argparse.SUPPRESS, **extra,
                            help=f.metadata["help"] + (f" (default: {f.default})" if f.name != "prompt" else ""))
    parser.add_argument("--resume", default=argparse.SUPPRESS, metavar="DIR", help="continue the run in DIR from its last checkpoint")
    given = vars(parser.parse_args(argv))
    if "resume" not in given:
        return dataclasses.replace(Config() if "model" in given else TINY, **given), None
    out = Path(given.pop("resume"))
    changed = set(given) - {"steps", "save_every", "device"}
    if changed:
        raise InputError(f"--resume continues the run as it was; only --steps, --save-every and --device may be given with it, not "
                         f"--{sorted(changed)[0].replace('_', '-')}")
    if not (out / "config.json").is_file():
        raise InputError(f"--resume {out}: there is no run in it (no config.json)")
    return dataclasses.replace(Config(**json.loads((out / "config.json").read_text(encoding="utf-8"))), **given), out


def main(argv=None) -> int:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        cfg, resume = parse_args(argv)
        train(cfg, resume)
    except torch.OutOfMemoryError:
        print(f"error: the GPU's memory is too small; lower --microbatch-tokens (now {cfg.microbatch_tokens}), --rollout-batch (now "
              f"{cfg.rollout_batch}) or --max-total-tokens (now {cfg.max_total_tokens}), or give --gradient-checkpointing", file=sys.stderr)
        return 2
    except (InputError, RetrieverError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
