"""GRPO for a search agent, why it collapses, and the regulariser that cures it, in one file.

Reference implementation of "On Group Relative Policy Optimization Collapse in Agent Search: The Lazy
Likelihood-Displacement" (arXiv 2512.04220v2, ICML 2026). A language model that may use a search engine is
trained with GRPO. The likelihood of its right answers silently falls (Lazy Likelihood Displacement, LLD)
until training collapses; the paper's regulariser LLDS penalises exactly that fall.

    python llds_grpo.py                         # a tiny agent that ships with this file: laptop, minutes
    python llds_grpo.py --model Qwen2.5-0.5B    # the real thing on one GPU

Symbols.  P questions, G responses each, B = P*G rows (a question's G rows are neighbours), T token positions,
K actions per response, V vocabulary entries, H hidden size.  Per-token tensors are (B, T) and shifted once:
column t belongs to the PREDICTED token input_ids[:, t + 1].  In the order of this file:

    section            paper       symbol                     function               tensor or value
    Rollout            Sec. 3      y_{i,t}, o_{i,t}           rollout                action_ids (B, T), t + 1
                       Sec. 3      r_i                        exact_match            rewards (P, G)
    Log-probabilities  Sec. 3      ln pi(y_{i,t,k} | ...)     token_logps            logps (B, T)
    GRPO               Sec. 3      A_i                        group_advantages       advantages (B,)
                       Eq. 1       J_GRPO                     grpo_loss              scalar
                       Sec. 6.1    J_GSPO                     gspo_loss              scalar
                       App. B.2.1  D_KL                       kl_penalty             scalar
    Displacement       Def. 4.1    Delta_t; its sum is Eq. 2  action_displacement    (B, K)
                       Sec. 3      y_{i,t} from a 0/1 mask    action_ids_from_mask   (B, T) for other trainers
    LLDS               Sec. 5.5    Delta_{i,t,k}              token_displacement     (B, T)
                       Eq. 4       L_LLDS                     llds_loss              scalar
                       Eq. 5       L_LLDS-MA                  llds_loss, beta < 1    scalar
                       Eq. 9       L_LLDS, token variant      llds_loss, "token"     scalar
                       Eq. 10      L_LLDS, response gate      llds_loss, "response"  scalar
                       App. B.2.1  beta                       answer_beta            float
                       Eq. 6       L_total                    total_loss             scalar
    Training step      Sec. 3      pi_old, then the updates   train_step()           a row of metrics.jsonl
    in eval.py         Eq. 3       Delta(x)                   displacement_probe     a float per question
                       Def. A.3    phases I, II, III          death_spiral           phase and step

Departures.  From the paper, where it leaves a choice or slips. (Where the official code differs from the
paper, we follow the paper; [official: file:line] says what it does, and the README lists all of it.)
 1. Eq. 1 prints t = 1..T_i; actions run 0..T_i (as in Eq. 4), so all actions count.
 2. A group whose rewards are all equal, or of one response, has A = 0 exactly (0/0 in the paper).
 3. Log-ratios are clamped to +-80 before exp, far outside any healthy value, lest float32 overflow.
 4. Y_pre and its token count are pooled over the mini-batch (Eq. 4 does not say over what).
 5. The k3 estimate of a token is bounded at 10 [official: core_algos.py:392], lest one token drown the rest.
"""
from __future__ import annotations

import inspect
import json
import math
import re
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from retriever import (InputError, autocast, check, checkpoints, encode_feedback, encode_prompt, exact_match,
                       exit_code, load_policy, load_task, load_tokenizer, mean, open_run, parse_args,
                       questions_of_step, resolve, run_folder, save_checkpoint, summary)

# ===================================================================================================== config
PROMPT = """Answer the question at the end. Reason between <think> and </think> before every step, also \
after new information has come in. When you lack a fact, write a query between <search> and </search>: the \
best passages of a search engine come back between <information> and </information>. You may search several \
times. As soon as you know enough, write the answer alone, without explanation, between <answer> and \
</answer>.
Question: {question}
"""                                                       # no example answer: small models repeat it
TINY_DIR = str(Path(__file__).resolve().parent / "tests" / "tiny")
knob = lambda default, text: field(default=default, metadata={"help": text})        # a setting, its --help


@dataclass
class Config:
    """Every number of a run. Defaults: one GPU of 24 GB; "paper" values are from Sec. 6 and App. B.2.1."""
    model: str = knob("Qwen2.5-0.5B", "hub name (Qwen2.5-... is Qwen/Qwen2.5-...) or folder; paper: 3B, 7B")
    data: str = knob("hotpotqa", "hub sets joined by +, or local .jsonl/.parquet files; paper: nq+hotpotqa")
    test_data: str = knob("", "what eval.py asks, in the same form; empty: the paper's seven benchmarks")
    corpus: str = knob("", "passages, .jsonl or .jsonl.gz; empty: HotpotQA's own paragraphs")
    retriever_url: str = knob("", "a Search-R1 server instead of a corpus; paper: E5 over the 2018 Wikipedia")
    hotpotqa_questions: int = knob(10_000, "HotpotQA questions to take where its paragraphs are the corpus")
    out: str = knob("", "run folder; empty: a new one under runs/")
    steps: int = knob(500, "rollout steps; paper: 1005 scheduled, plotted to 500")
    seed: int = knob(0, "seed of question order and sampling")
    save_every: int = knob(50, "steps between checkpoints")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", "where to run")
    # rollout
    prompt: str = knob(PROMPT, "text around {question}")
    chat: Literal["auto", "yes", "no"] = knob("auto", "use the chat template; auto: yes for -Instruct models")
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
    objective: Literal["grpo", "gspo"] = knob("grpo", "grpo (Eq. 1) or gspo (Sec. 6.1)")
    clip_eps: float = knob(0.2, "eps of Eq. 1; paper: 0.2")
    kl_coef: float = knob(0.001, "weight of the KL penalty; paper: 0.001; 0 drops the reference model")
    llds_lambda: float = knob(0.2, "lambda of Eq. 6; paper: 0.2 (0.3 for 7B-Instruct); 0 is plain GRPO")
    gate: Literal["action", "response", "token"] = knob("action", "of LLDS: Eq. 4, Eq. 10 or Eq. 9")
    answer_beta: str = knob("1", "beta of Eq. 5: a number, or adaptive (App. B.2.1); 1: LLDS without masking")
    # optimisation
    updates_per_rollout: int = knob(4, "optimiser steps per rollout; paper: 10; LLDS needs at least 2")
    lr: float = knob(1e-6, "AdamW learning rate; paper: 1e-6")
    warmup_steps: int = knob(10, "rollout steps of linear warm-up; official: 28.5 %% of 1005")
    weight_decay: float = knob(0.01, "AdamW weight decay; official: 0.01")
    max_grad_norm: float = knob(1.0, "gradient clipping; official: 1.0")
    microbatch_tokens: int = knob(4096, "tokens per forward and backward pass; changes memory and speed only")
    gradient_checkpointing: bool = knob(False, "recompute activations in the backward pass: less memory")


# The second set of values: the stand-in world of tests/tiny, whose collapse takes minutes on a laptop.
TINY = Config(
    model=TINY_DIR, data=f"{TINY_DIR}/train.jsonl", test_data=f"{TINY_DIR}/test.jsonl", weight_decay=0.0,
    corpus=f"{TINY_DIR}/corpus.jsonl", prompt="Question: {question}\n", steps=120, lr=7e-4, warmup_steps=50,
    max_action_tokens=32, max_feedback_tokens=64, max_total_tokens=320, rollout_batch=160,
    microbatch_tokens=16384)


# ================================================================================ Sec. 3: actions and rollout
CLOSING = re.compile(r"</(search|answer)>")


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


@dataclass
class Trajectory:
    """One response y_0, o_0, y_1, o_1, ..., y_T. Its three lists of tokens include the prompt's."""
    question: dict
    ids: list[int] = field(default_factory=list)          # as fed and sampled  [official: generation.py:55]
    action_ids: list[int] = field(default_factory=list)   # 0 = prompt or feedback, t + 1 = token of y_t
    answer_mask: list[bool] = field(default_factory=list)  # token of the answer span, tags included
    turns: list[dict] = field(default_factory=list)       # {"action", "feedback"} as text
    valid: int = 0                                        # actions that were a search or an answer
    searches: int = 0                                     # searches that were executed
    first_docs: tuple | None = None                       # ids of the passages that the first search returned
    truncated: bool = False                               # an action or the whole hit a token limit
    answer: str | None = None                             # of the model's own action  [official: qa_em.py:73]
    reward: float = 0.0

    def append(self, ids: list[int], action_id: int, answer_from: int | None = None) -> None:
        """Add an action, or feedback (action_id 0); answer_from: where in ids the answer span begins."""
        self.ids = self.ids + ids
        self.action_ids += [action_id] * len(ids)
        self.answer_mask += [answer_from is not None and k >= answer_from for k in range(len(ids))]


class Sampler:
    """Samples actions for b rows of unequal length; the key-value cache is kept from turn to turn."""

    def __init__(self, model, tokenizer, rows: int, temperature: float, generator):
        self.model, self.tokenizer, self.generator = model, tokenizer, generator
        self.temperature, self.cache = temperature, transformers.DynamicCache(config=model.config)
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"    # new in transformers 5.24
        self.mask = torch.zeros(rows, 0, dtype=torch.long, device=model.device)     # (b, S) 1 = real token
        eos = [model.generation_config.eos_token_id, tokenizer.eos_token_id]
        self.eos = {i for ids in eos if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
        self.closing = {i for word, i in tokenizer.get_vocab().items() if ">" in word}    # may complete a tag

    def read(self, lists: list[list[int]]) -> torch.Tensor:
        """Read some tokens (or none) per row; logits (b, V) of what follows each row's last one."""
        width, device = max(map(len, lists)), self.mask.device
        ids = torch.tensor([x + [0] * (width - len(x)) for x in lists], device=device)                # (b, w)
        new = torch.tensor([[1] * len(x) + [0] * (width - len(x)) for x in lists], device=device)     # (b, w)
        positions = self.mask.sum(1, keepdim=True) + torch.arange(width, device=device)               # (b, w)
        self.mask = torch.cat([self.mask, new], 1)                                  # (b, S + w)
        output = self.model.base_model(input_ids=ids, attention_mask=self.mask, position_ids=positions,
                                       use_cache=True, **{self.cache_name: self.cache})
        last = (new.sum(1) - 1).clamp(min=0)                                        # (b,)
        hidden = output.last_hidden_state[torch.arange(len(last)), last]            # (b, H)
        return self.model.get_output_embeddings()(hidden).float()                   # (b, V)

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.cache.batch_select_indices(torch.tensor(rows, device=self.mask.device))
        self.mask = self.mask[rows]

    def ends(self, ids: list[int]) -> bool:
        """Whether an action is complete: its text closes a search or an answer, or its last token is EOS."""
        closes = ids[-1] in self.closing and CLOSING.search(self.tokenizer.decode(ids))
        return ids[-1] in self.eos or bool(closes)

    def sample(self, unread: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Read what is new in each row, then write one action of at most limits[row] (>= 1) tokens."""
        actions, live = [[] for _ in limits], set(range(len(limits)))
        while live:
            logits = self.read(unread)                                              # (b, V)
            if not logits.isfinite().all():
                raise InputError("the policy's logits are not finite: the checkpoint is damaged")
            if self.temperature:                                   # the full distribution: no top-k, no top-p
                pi = (logits / self.temperature).softmax(-1)                        # (b, V)
                tokens = torch.multinomial(pi, 1, generator=self.generator)[:, 0].tolist()            # b
            else:
                tokens = logits.argmax(-1).tolist()                                 # b
            for row in list(live):
                actions[row].append(tokens[row])
                if self.ends(actions[row]) or len(actions[row]) == limits[row]:
                    live.remove(row)
            unread = [[token] if row in live else [] for row, token in enumerate(tokens)]
        return actions


@torch.no_grad()
def rollout(model, tokenizer, questions, retriever, cfg, generator, temperature=None) -> list[Trajectory]:
    """One trajectory per question, in turns y_0, o_0, y_1, ..., y_T: at most cfg.max_turns get feedback o_t.

    The action after those must answer; a search in it is not executed. temperature: cfg's unless given; 0 is
    greedy. Raises InputError for logits that are not finite and for a prompt that leaves no room.
    """
    rows, found = [Trajectory(question) for question in questions], {}
    for row in rows:
        row.append(encode_prompt(row.question["question"], tokenizer, cfg), 0)
    live, unread = rows, [row.ids for row in rows]                    # unread: not yet in the key-value cache
    temperature = cfg.temperature if temperature is None else temperature
    sampler = Sampler(model, tokenizer, len(rows), temperature, generator)
    for turn in range(cfg.max_turns + 1):
        limits = [min(cfg.max_action_tokens, cfg.max_total_tokens - len(row.ids)) for row in live]
        actions = sampler.sample(unread, limits)                                    # y_t
        parsed = [record_action(row, turn, ids, tokenizer) for row, ids in zip(live, actions)]
        for row, ids, limit in zip(live, actions, limits):
            row.truncated |= len(ids) == limit and not sampler.ends(ids)
        if turn == cfg.max_turns:
            break
        new = list(dict.fromkeys(query for kind, query in parsed if kind == "search" and query not in found))
        found.update(zip(new, retriever.search(new, cfg.topk)))       # each query once per rollout
        unread, goes_on = [], []
        for i, (row, ids, (kind, query)) in enumerate(zip(live, actions, parsed)):
            feedback = kind != "answer" and record_feedback(row, found.get(query), tokenizer, cfg)    # o_t
            if feedback:
                unread.append(ids[-1:] + feedback)                    # the last sampled token is unread, too
                goes_on.append(i)
        if not goes_on:
            break
        if len(goes_on) < len(live):
            sampler.keep(goes_on)
            live = [live[i] for i in goes_on]
    for row in rows:
        row.reward = exact_match(row.answer, row.question["golden_answers"])        # r_i
    return rows


def record_action(row, turn, ids, tokenizer) -> tuple[str, str]:
    """Append y_t to its trajectory; returns parse_action's result."""
    text, start = tokenizer.decode(ids), None
    kind, content = parse_action(text)
    if kind == "answer":                          # the action ends with its tag; find where it opens
        characters = lambda n: len(tokenizer.decode(ids[:n]))
        start = bisect_right(range(len(ids)), text.rindex("<answer>"), key=characters) - 1
        row.answer = content
    row.append(ids, turn + 1, start)
    row.turns.append({"action": text, "feedback": ""})
    row.valid += kind != "invalid"
    return kind, content


def record_feedback(row, passages, tokenizer, cfg) -> list[int]:
    """Append o_t; its ids, or [] where no room for y_t+1 is left. passages: None for an invalid action."""
    feedback = encode_feedback(passages, tokenizer, cfg.max_feedback_tokens)
    row.searches += passages is not None
    if row.searches == 1 and row.first_docs is None:
        row.first_docs = tuple(p["id"] for p in passages)
    row.turns[-1]["feedback"] = tokenizer.decode(feedback)
    if len(row.ids) + len(feedback) >= cfg.max_total_tokens:
        row.truncated = True
        return []
    row.append(feedback, 0)
    return feedback


# ================================================================================== Sec. 3: log-probabilities
def token_logps(model, input_ids, action_ids, temperature=1.0, with_entropy=False, max_logits=2**27):
    """ln pi(token) at action tokens, 0 elsewhere, and likewise the entropy in nats: two (B, T), float32.

    input_ids (B, T + 1), right-padded; action_ids (B, T). Padding stands right of every action token and
    attention is causal, so no attention mask is needed. Only action tokens need logits: at V = 151,936 those
    of 4,096 tokens are 2.5 GB. More than max_logits are made piece by piece, and again in the backward pass.
    """
    head = model.get_output_embeddings()
    chosen = action_ids > 0                                                         # (B, T), N of them
    end = int(chosen.any(0).nonzero().max()) + 1 if chosen.any() else 1             # the rest is padding

    def score(hidden, target):                                                      # (n, H), (n,)
        logits = head(hidden).float()                                               # (n, V)
        logps = (logits / temperature).log_softmax(-1)                              # (n, V) the sampler's pi
        entropy = -(logps.exp() * logps).sum(-1) if with_entropy else target.float() * 0       # (n,)
        return logps.gather(-1, target[:, None])[:, 0], entropy                     # (n,), (n,)

    with autocast(input_ids.device):
        hidden = model.base_model(input_ids=input_ids[:, :end], use_cache=False).last_hidden_state
        hidden, target = hidden[chosen[:, :end]], input_ids[:, 1:][chosen]          # (N, H), (N,)
        size = max(1, max_logits // head.weight.shape[0])                           # tokens in a piece
        again = torch.is_grad_enabled() and len(target) > size
        scores = [checkpoint(score, *piece, use_reentrant=False) if again else score(*piece)
                  for piece in zip(hidden.split(size), target.split(size))]
    return [torch.zeros(chosen.shape, device=chosen.device).masked_scatter(chosen, torch.cat(values))
            for values in zip(*scores)]                                             # (B, T), (B, T)


# ============================================================================== Sec. 3: group advantage, GRPO
def group_advantages(rewards):
    """Sec. 3: A_i = (r_i - mu) / sigma, mean and population standard deviation of the group's rewards.

    rewards (P, G) -> (P, G). Equal rewards, or G = 1, give exactly 0.
    """
    centred = rewards - rewards.mean(1, keepdim=True)                               # (P, G)
    sigma = centred.square().mean(1, keepdim=True).sqrt()       # (P, 1) [official: core_algos.py:149, sample]
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)                        # (P, 1)
    return torch.where(equal, torch.zeros_like(centred), centred / sigma)           # (P, G)


def log_ratio(logps, old_logps, mask):
    """ln g = ln pi_theta - ln pi_old where mask is True, 0 elsewhere: (B, T). Masked before any arithmetic.

    Clamped to +-80 [ours], so that exp() and its gradient stay finite in float32.
    """
    new = torch.where(mask, logps, torch.zeros_like(logps))                         # (B, T)
    old = torch.where(mask, old_logps.detach(), torch.zeros_like(logps))            # (B, T)
    return (new - old).clamp(-80, 80)                                               # (B, T)


def grpo_loss(logps, old_logps, advantages, action_ids, group_size, clip_eps=0.2):
    """Eq. 1 negated: L = -mean over questions of 1/sum_i|y_i| sum_itk min(g A_i, clip(g, 1-eps, 1+eps) A_i).

    logps, old_logps, action_ids (B, T); advantages (B,); a question's rows are neighbours -> scalar.
    Needs log_ratio.
    """
    mask = action_ids > 0                                                           # (B, T) the feedback mask
    ratio = log_ratio(logps, old_logps, mask).exp()                                 # (B, T) g_{i,t,k}
    A = advantages[:, None]                                                         # (B, 1)
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)                               # (B, T)
    surrogate = torch.minimum(ratio * A, clipped * A) * mask                        # (B, T)
    # [official: core_algos.py:189 clamps g to 100, :195 pools the tokens of all questions]
    of_question = lambda x: x.reshape(-1, group_size * x.shape[1]).sum(1)           # (B, T) -> (P,)
    return -(of_question(surrogate) / of_question(mask).clamp(min=1)).mean()


def gspo_loss(logps, old_logps, advantages, action_ids, clip_eps=0.2):
    """Sec. 6.1 (GSPO): L = -mean_i min(s_i A_i, clip(s_i, 1-eps, 1+eps) A_i), s_i = exp(mean_tk ln g).

    logps, old_logps, action_ids (B, T); advantages (B,) -> scalar. A response without tokens adds 0.
    Needs log_ratio.
    """
    mask = action_ids > 0                                                           # (B, T)
    mean = log_ratio(logps, old_logps, mask).sum(1) / mask.sum(1).clamp(min=1)      # (B,)
    ratio = mean.exp()                                                              # (B,) s_i
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)                               # (B,)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)             # (B,)
    return -(surrogate * mask.any(1)).mean()


def kl_penalty(logps, ref_logps, action_ids):
    """App. B.2.1: k3 estimate of KL(pi || pi_ref), mean over tokens of e^d - d - 1, d = ln pi_ref - ln pi.

    logps, ref_logps, action_ids (B, T) -> scalar from 0 to 10.
    """
    mask = action_ids > 0                                                           # (B, T)
    d = torch.where(mask, ref_logps.detach() - logps, torch.zeros_like(logps)).clamp(-80, 80)         # (B, T)
    k3 = (d.exp() - d - 1).clamp(max=10)                                            # (B, T)
    return (k3 * mask).sum() / mask.sum().clamp(min=1)


# ================================================================= Sec. 4: Lazy Likelihood Displacement (LLD)
def action_displacement(logps, old_logps, action_ids):
    """Def. 4.1: Delta_t = ln pi_fin(y_t | ...) - ln pi_old(y_t | ...), summed over the tokens of each action.

    logps, old_logps, action_ids (B, T) -> (B, K), 0 for an action that a row has not. LLD: Delta_t <= eps.
    The whole response (Eq. 2) is the sum over the last axis.
    """
    sums = logps.new_zeros(len(logps), int(action_ids.max()) + 1)                   # (B, K + 1), 0: feedback
    return sums.scatter_add(1, action_ids, logps - old_logps)[:, 1:]                # (B, K)


def action_ids_from_mask(mask):
    """Sec. 3, for trainers that keep a 0/1 mask of model-written tokens: k on the k-th run of 1s.

    mask (B, T) -> (B, T). Two actions with no feedback between them become one, with one gate in Eq. 4.
    """
    mask = mask.bool()                                                              # (B, T)
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))                          # (B, T) one to the left
    return (mask & ~before).cumsum(1) * mask                                        # (B, T)


# ============================================================================================= Sec. 5.5: LLDS
def token_displacement(logps, old_logps):
    """Sec. 5.5: Delta_{i,t,k} = ln pi_old(token) - ln pi_theta(token); positive = the token lost likelihood.

    logps, old_logps (B, T) -> (B, T). The sign is opposite to Def. 4.1's.
    """
    return old_logps.detach() - logps                                               # (B, T)


def llds_loss(logps, old_logps, advantages, action_ids, gate="action", answer_mask=None, beta=1.0):
    """Eq. 4: L = 1/(sum_{Y_pre} sum_t |y_it|) sum_{Y_pre} sum_t 1[sum_k Delta > 0] sum_k max(0, Delta).

    gate "action" is Eq. 4, "response" Eq. 10 (one indicator over the response), "token" Eq. 9 (none).
    Eq. 5 (LLDS-MA): beta weighs max(0, Delta) where answer_mask (B, T) is True; the gate stays unweighted.
    Y_pre: responses with A_i >= 0. logps, old_logps, action_ids (B, T); advantages (B,) -> scalar.
    Raises ValueError for an unknown gate. Needs token_displacement.
    """
    kept = (action_ids > 0) & (advantages >= 0)[:, None]                            # (B, T) tokens of Y_pre
    delta = torch.where(kept, token_displacement(logps, old_logps), torch.zeros_like(logps))          # (B, T)
    with torch.no_grad():                                         # [official: dp_actor.py:390 leaks gradient]
        if gate == "action":                                      # Eq. 4  [official: dp_actor.py:60, by mask]
            sums = delta.new_zeros(len(delta), int(action_ids.max()) + 1)           # (B, K + 1)
            opened = (sums.scatter_add(1, action_ids, delta) > 0).gather(1, action_ids)               # (B, T)
        elif gate == "response":                                  # Eq. 10
            opened = delta.sum(1, keepdim=True) > 0                                 # (B, 1)
        elif gate == "token":                                     # Eq. 9
            opened = torch.ones_like(kept)                                          # (B, T)
        else:
            raise ValueError(f"gate must be action, response or token, not {gate!r}")
        weight = opened.to(delta.dtype)                                             # (B, T) or (B, 1)
        if answer_mask is not None:                               # Eq. 5
            weight = weight * (1 - (1 - beta) * answer_mask.to(delta.dtype))        # (B, T)
    penalty = torch.relu(delta) * weight                          # (B, T) relu has slope 0 at Delta = 0
    return penalty.sum() / kept.sum().clamp(min=1)                # [official: dp_actor.py:396, all responses]


def answer_beta(mean_searches, v_base=2.0):
    """App. B.2.1: beta = min(V_s / V_B, 1), V_s the mean number of executed searches per trajectory."""
    return min(mean_searches / v_base, 1.0)                       # [official: dp_actor.py:361, V_s - 1]


def total_loss(cfg, logps, batch, beta):
    """Eq. 6: L_total = L_GRPO + lambda L_LLDS(-MA), plus the KL penalty of App. B.2.1: (total, its terms)."""
    old, A, action_ids = batch["old_logps"], batch["advantages"], batch["action_ids"]   # (B, T), (B,), (B, T)
    loss = (grpo_loss(logps, old, A, action_ids, cfg.group_size, cfg.clip_eps) if cfg.objective == "grpo"
            else gspo_loss(logps, old, A, action_ids, cfg.clip_eps))
    llds = llds_loss(logps, old, A, action_ids, cfg.gate, batch["answer_mask"], beta)
    kl = kl_penalty(logps, batch["ref_logps"], action_ids) if cfg.kl_coef else torch.zeros(())
    loss = loss + cfg.llds_lambda * llds + cfg.kl_coef * kl       # [official: dp_actor.py:346, entropy bonus]
    return loss, {"loss": loss.item(), "llds": llds.item(), "kl": kl.item()}


# ============================================================================================== training step
def make_minibatches(rows: list[Trajectory], cfg, device) -> list[dict]:
    """A rollout's advantages, ids and masks as updates_per_rollout mini-batches of whole groups.

    Their micro-batches are row numbers: rows of like length, at most microbatch_tokens with the padding.
    """
    rewards = torch.tensor([row.reward for row in rows]).view(-1, cfg.group_size)   # (P, G)
    advantages = group_advantages(rewards).flatten().to(device)                     # (P * G,)
    size, minibatches = len(rows) // cfg.updates_per_rollout, []
    for start in range(0, len(rows), size):
        part = rows[start:start + size]
        length = max(len(row.ids) for row in part)
        padded = lambda row, name: getattr(row, name) + [0] * (length - len(row.ids))
        column = lambda name: torch.tensor([padded(row, name) for row in part], device=device)    # (B, T + 1)
        minibatches.append({
            "input_ids": column("ids"),                                             # (B, T + 1)
            "action_ids": column("action_ids")[:, 1:],                              # (B, T) shifted once
            "answer_mask": column("answer_mask")[:, 1:],                            # (B, T)
            "advantages": advantages[start:start + size],                           # (B,)
            "microbatches": [torch.tensor(numbers, device=device) for numbers in
                             microbatches([len(row.ids) for row in part], cfg.microbatch_tokens)]})
    return minibatches


def microbatches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Row numbers, rows of similar length together, each at most max_tokens with its padding."""
    groups = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else math.inf
        if lengths[i] > 0.8 * longest and (len(groups[-1]) + 1) * longest <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


@torch.no_grad()
def minibatch_logps(model, batch, temperature=1.0, with_entropy=False):
    """token_logps of a whole mini-batch, by the training pass's own micro-batches: two (B, T)."""
    logps = torch.zeros(batch["action_ids"].shape, device=batch["input_ids"].device)                  # (B, T)
    entropy = torch.zeros_like(logps)                                               # (B, T)
    for rows in batch["microbatches"]:
        logps[rows], entropy[rows] = token_logps(model, batch["input_ids"][rows], batch["action_ids"][rows],
                                                 temperature, with_entropy)
    return logps, entropy


def update(policy, optimizer, batch, cfg, beta) -> dict:
    """One optimiser step on Eq. 6 for a mini-batch; a loss or gradient that is not finite skips it.

    Every term of Eq. 6 is a sum over rows divided by counts that do not depend on the policy. The gradient of
    some rows is that of the whole loss with the other rows held constant: micro-batches change no value.
    """
    optimizer.zero_grad()
    policy.train()                                                   # checkpointing needs it; dropout is 0
    logps = batch["old_logps"].clone()                                              # (B, T)
    for rows in batch["microbatches"]:
        new, _ = token_logps(policy, batch["input_ids"][rows], batch["action_ids"][rows], cfg.temperature)
        total_loss(cfg, logps.index_copy(0, rows, new), batch, beta)[0].backward()
        logps[rows] = new.detach()
    _, terms = total_loss(cfg, logps, batch, beta)                # the mini-batch's own value, all rows new
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm).item()
    healthy = math.isfinite(norm) and math.isfinite(terms["loss"])
    if healthy:
        optimizer.step()
    mask, A = batch["action_ids"] > 0, batch["advantages"][:, None]                 # (B, T), (B, 1)
    ratio = log_ratio(logps, batch["old_logps"], mask).exp()                        # (B, T)
    cut = mask & torch.where(A > 0, ratio > 1 + cfg.clip_eps, (A < 0) & (ratio < 1 - cfg.clip_eps))   # (B, T)
    kept = batch["advantages"] >= 0                                                 # (B,)
    opened = action_displacement(logps, batch["old_logps"], batch["action_ids"])[kept] < 0        # (B_pre, K)
    actions = batch["action_ids"].amax(1)[kept].sum()                               # of Y_pre
    return {**terms, "grad_norm": norm, "skipped": int(not healthy), "ratio_max": ratio.max().item(),
            "clip_fraction": (cut.sum() / mask.sum().clamp(min=1)).item(),
            "gate_open": (opened.sum() / actions.clamp(min=1)).item()}


def rollout_metrics(rows: list[Trajectory], minibatches: list[dict], cfg) -> dict:
    """What Figs. 2, 4, 5 and 9 plot, from one rollout and pi_old's log-probabilities and entropy at it."""
    logps = [x[ids > 0] for batch in minibatches for x, ids in zip(batch["old_logps"], batch["action_ids"])]
    turn = [ids[ids > 0] for batch in minibatches for ids in batch["action_ids"]]
    metrics = {"reward": mean([row.reward for row in rows])}
    for name, right in (("right", True), ("wrong", False)):                         # Figs. 2, 9a, then 5
        of = [i for i, row in enumerate(rows) if (row.reward > 0) == right]
        metrics[f"logp_{name}"] = mean([x for i in of for x in logps[i].tolist()])
        for k in range(1, cfg.max_turns + 2):
            metrics[f"logp_{name}_action{k}"] = mean([x for i in of for x in logps[i][turn[i] == k].tolist()])
    groups, matches = [rows[i:i + cfg.group_size] for i in range(0, len(rows), cfg.group_size)], []
    for group in groups:                                                            # Fig. 5
        docs = [row.first_docs for row in group if row.reward > 0]
        matches += [r.first_docs is not None and r.first_docs in docs for r in group if docs and not r.reward]
    actions, tokens = sum(len(row.turns) for row in rows), sum(map(len, turn))
    return {**metrics, "action_tokens": tokens / actions, "searches": mean([row.searches for row in rows]),
            "entropy": sum(batch["entropy"].sum().item() for batch in minibatches) / max(tokens, 1),
            "valid_actions": sum(row.valid for row in rows) / actions, "match_ratio": mean(matches),
            "zero_groups": mean([float(len({row.reward for row in group}) == 1) for group in groups]),
            "truncated": mean([float(row.truncated) for row in rows])}


def probe_logp(policy, probe: list[tuple], cfg) -> float | None:
    """Fig. 2 without survivors' bias: ln pi per token of fixed right responses, (ids, action_ids) each."""
    if not probe:
        return None
    rows = [Trajectory({}, ids, action_ids, [False] * len(ids)) for ids, action_ids in probe]
    batch, = make_minibatches(rows, replace(cfg, group_size=1, updates_per_rollout=1), policy.device)
    logps, _ = minibatch_logps(policy, batch, cfg.temperature)                      # (B, T)
    return logps.sum().item() / int((batch["action_ids"] > 0).sum())


def train_step(step, policy, reference, tokenizer, optimizer, generator, probe, questions, retriever, cfg):
    """One rollout and its updates: sample, score, mask, ln pi_old, Eq. 6. Returns a row of metrics.jsonl."""
    # 1. Sample G responses to each of P questions (Sec. 3); their rewards r_i come with them.
    asked = [q for q in questions_of_step(questions, step, cfg) for _ in range(cfg.group_size)]       # B
    rows, clock = [], [time.perf_counter()]
    policy.eval()                                                # in train mode checkpointing drops the cache
    for i in range(0, len(asked), cfg.rollout_batch):
        with autocast(policy.device):
            rows += rollout(policy, tokenizer, asked[i:i + cfg.rollout_batch], retriever, cfg, generator)
    clock.append(time.perf_counter())
    # 2. Score and mask: A_i, action ids and answer spans, cut into mini-batches of whole groups.
    minibatches = make_minibatches(rows, cfg, policy.device)
    # 3. ln pi_old, before any update and by the code of the training pass: Delta starts at exactly 0.
    for batch in minibatches:
        batch["old_logps"], batch["entropy"] = minibatch_logps(policy, batch, cfg.temperature, True)  # (B, T)
        if reference is not None:
            batch["ref_logps"], _ = minibatch_logps(reference, batch, cfg.temperature)                # (B, T)
    clock.append(time.perf_counter())
    probe += [(row.ids, row.action_ids) for row in rows if row.reward > 0][:32] if step == 0 else []
    metrics = {**rollout_metrics(rows, minibatches, cfg), "logp_probe": probe_logp(policy, probe, cfg)}
    # 4. Updates: pi_theta leaves pi_old, and LLDS acts from the second one on.
    lr = cfg.lr * min(1.0, (step + 1) / max(cfg.warmup_steps, 1))
    for group in optimizer.param_groups:
        group["lr"] = lr
    beta = answer_beta(metrics["searches"]) if cfg.answer_beta == "adaptive" else float(cfg.answer_beta)
    updates = [update(policy, optimizer, batch, cfg, beta) for batch in minibatches]
    clock.append(time.perf_counter())
    # 5. The step's metrics: means over its updates, the largest norm and ratio, the number skipped.
    for name in updates[0]:
        over = {"grad_norm": max, "ratio_max": max, "skipped": sum}.get(name, mean)
        metrics[name] = over([u[name] for u in updates])
    rollout_s, logps_s, update_s = (after - before for before, after in zip(clock, clock[1:]))
    row = {"step": step, **metrics, "beta": beta, "lr": lr,
           "tokens_per_second": sum(a > 0 for row in rows for a in row.action_ids) / (clock[-1] - clock[0]),
           "seconds_rollout": rollout_s, "seconds_logps": logps_s, "seconds_update": update_s}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


# ============================================================================================== training loop
def train(cfg: Config, resume: Path | None = None) -> Path:
    """Run GRPO (+ LLDS); returns the run's folder: config.json, metrics.jsonl, checkpoint-STEP/."""
    check(cfg)
    out = resume or run_folder(cfg)
    start = next(reversed(checkpoints(out)), None) if resume else None     # none yet: from the first step on
    tokenizer = load_tokenizer(cfg.model)
    device = resolve(cfg, tokenizer)
    policy = load_policy(str(start or cfg.model), device, tokens=cfg.max_total_tokens)
    reference = load_policy(cfg.model, device, trainable=False) if cfg.kl_coef else None
    if cfg.gradient_checkpointing:
        policy.activation_checkpointing_enable()
    questions, retriever = load_task(cfg)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    probe = []                                                  # right responses of the initial policy
    first = open_run(out, start, cfg, optimizer, generator, probe)
    bar = tqdm(range(first, cfg.steps), initial=first, total=cfg.steps, desc=out.name)
    try:
        for step in bar:
            row = train_step(step, policy, reference, tokenizer, optimizer, generator, probe, questions,
                             retriever, cfg)
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
            shown = {key: row[key] for key in ("reward", "logp_right", "entropy", "grad_norm", "skipped")}
            bar.set_postfix({key: "-" if value is None else f"{value:.3g}" for key, value in shown.items()})
            if (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
                save_checkpoint(out, step + 1, policy, tokenizer, optimizer, generator, probe)
    except BaseException as error:                              # Ctrl-C, a dead retrieval server, a full disk
        bar.close()
        print(f"stopped at step {bar.n}; continue with: python {Path(sys.argv[0]).name} --resume {out}",
              file=sys.stderr)
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(f"too little memory; lower --microbatch-tokens (now {cfg.microbatch_tokens}) or "
                             f"--rollout-batch (now {cfg.rollout_batch}), or give --gradient-checkpointing")
        raise
    print(summary(out))
    return out


def main(argv=None) -> int:
    """The command line: 0, or 2 for bad input, 130 for Ctrl-C."""
    return exit_code(lambda: train(*parse_args(sys.argv[1:] if argv is None else argv, Config(), TINY)))


if __name__ == "__main__":
    sys.exit(main())
