"""Measures speed and memory as ratios, both sides in one process or in like subprocesses. Not a test: prints tables.

    python tests/bench.py rollout [--model DIR]           key-value cache across turns against generate() once per turn
    python tests/bench.py logps                           action-token logits in chunks against full logits (needs 20 GB)
    python tests/bench.py bm25 [--corpus FILE --questions FILE]        postings against rank_bm25's get_scores
    python tests/bench.py scale                           a training step with each size doubled once
"""
import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llds_grpo as L                                                                                       # noqa: E402
from retriever import INVALID, BM25Retriever, LuceneBM25, load_corpus, tokenize                                      # noqa: E402


def seconds(function, repeats=5):
    """Median wall seconds of `repeats` calls after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# --------------------------------------------------------------------------------------------------------------- rollout

def plain_rollout(model, tokenizer, questions, retriever, cfg):
    """The usual way: each turn re-encodes the whole text and calls generate() on it. Returns the number of sampled tokens."""
    texts = [cfg.prompt.replace("{question}", q["question"]) for q in questions]
    live, sampled = list(range(len(texts))), 0
    ends = [i for tag in ("</search>", "</answer>") for i in tokenizer.encode(tag, add_special_tokens=False)]
    stop = {"eos_token_id": ends} if len(ends) == 2 else {"stop_strings": ["</search>", "</answer>"], "tokenizer": tokenizer}
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for turn in range(cfg.max_turns + 1):
        inputs = tokenizer([texts[i] for i in live], return_tensors="pt", padding=True)
        output = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                max_new_tokens=cfg.max_action_tokens, pad_token_id=tokenizer.pad_token_id, **stop)
        new = output[:, inputs.input_ids.shape[1]:]
        goes_on, queries = [], []
        for i, ids in zip(live, new.tolist()):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            sampled += sum(t != tokenizer.pad_token_id for t in ids)
            kind, content = L.parse_action(text)
            texts[i] += text
            if kind != "answer":
                goes_on.append(i)
                queries.append(content if kind == "search" else None)
        if not goes_on or turn == cfg.max_turns:
            return sampled
        found = retriever.search([q or "" for q in queries], cfg.topk)
        for i, query, passages in zip(goes_on, queries, found):
            texts[i] += INVALID if query is None else tokenizer.decode(L.encode_feedback(passages, tokenizer, cfg.max_feedback_tokens))
        live = goes_on
    return sampled


def bench_rollout(args):
    cfg = L.TINY
    rows, repeats = 160, 5
    if args.model:
        cfg = L.Config(model=args.model, data=L.TINY.data, corpus=args.corpus or L.TINY.corpus, max_action_tokens=48, max_feedback_tokens=200)
        rows, repeats = 8, 3
    tokenizer, model = L.load_tokenizer(cfg.model), L.load_policy(cfg.model, torch.device("cpu"), trainable=False)
    questions, retriever = L.load_task(cfg)
    questions = [q for q in questions[:max(rows // 5, 2)] for _ in range(5)][:rows]
    rates = {"plain": [], "ours": []}
    for repeat in range(repeats + 1):
        torch.manual_seed(repeat)
        start = time.perf_counter()
        tokens = plain_rollout(model, tokenizer, questions, retriever, cfg)
        middle = time.perf_counter()
        trajectories = L.rollout(model, tokenizer, questions, retriever, cfg, torch.Generator().manual_seed(repeat))
        ours = sum(a > 0 for t in trajectories for a in t.action_ids)
        rates["plain"].append(tokens / (middle - start))
        rates["ours"].append(ours / (time.perf_counter() - middle))
    plain, ours = (statistics.median(rates[k][1:]) for k in ("plain", "ours"))
    ratios = [b / a for a, b in zip(rates["plain"][1:], rates["ours"][1:])]
    print(f"rollout, {Path(cfg.model).name}, {rows} rows: sampled tokens/s plain {plain:.0f}, ours {ours:.0f}, "
          f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {repeats} pairs")


# -------------------------------------------------------------------------------------------------------- training pass

def logps_side(side):
    """One side in a process of its own: forward and backward at 8 x 1,024 tokens, half of them action tokens."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=151_936, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
                                         num_key_value_heads=2, tie_word_embeddings=True))
    ids = torch.randint(0, 151_936, (8, 1025))
    action_ids = (torch.arange(1024) % 256 >= 128).long().expand(8, -1).contiguous()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def ours():
        return L.token_logps(model, ids, action_ids)[0]

    def full():
        logits = model(ids[:, :-1]).logits.float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * (action_ids > 0)

    def step():
        model.zero_grad()
        logps = {"ours": ours, "full": full}[side]()
        logps.sum().backward()
        return logps.detach()

    logps = step()
    took = seconds(step, 3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grad = model.model.layers[0].mlp.up_proj.weight.grad
    print(json.dumps({"seconds": took, "peak_mb": (peak - base) / 1024, "logp": logps.sum().item(), "grad": grad.norm().item()}))


def bench_logps(args):
    results = {}
    for side in ("ours", "full"):
        out = subprocess.run([sys.executable, __file__, "logps-side", "--side", side], capture_output=True, text=True, check=True).stdout
        results[side] = json.loads(out.splitlines()[-1])
        print(f"training pass, {side}: {results[side]}")
    print(f"time ours/full {results['ours']['seconds'] / results['full']['seconds']:.2f}, peak memory ours/full {results['ours']['peak_mb'] / results['full']['peak_mb']:.2f}")


# ------------------------------------------------------------------------------------------------------------------ BM25

def traced_mb(build):
    """Megabytes still held by what build() returns, without what was there before."""
    tracemalloc.start()
    built = build()
    held = tracemalloc.get_traced_memory()[0]
    del built
    tracemalloc.stop()
    return held / 1e6


def bench_bm25(args):
    rng = np.random.default_rng(0)
    cases = {}
    if args.corpus:
        questions = [json.loads(line)["question"] for line in open(args.questions)]
        cases[Path(args.corpus).name] = load_corpus(args.corpus), questions
    words = [f"w{i}" for i in range(50_000)]
    weights = 1 / np.arange(1, len(words) + 1)
    draw = lambda n: " ".join(rng.choice(words, n, p=weights / weights.sum()))
    cases["100,000 random passages"] = [{"id": str(i), "title": "", "text": draw(60)} for i in range(100_000)], [draw(12) for _ in range(20)]
    for name, (passages, questions) in cases.items():
        texts = [tokenize(f"{p['title']} {p['text']}") for p in passages]
        start = time.perf_counter()
        theirs = LuceneBM25(texts)
        middle = time.perf_counter()
        words_again = [tokenize(f"{p['title']} {p['text']}") for p in passages]
        tokenizing = time.perf_counter() - middle
        del words_again
        middle2 = time.perf_counter()
        ours = BM25Retriever(passages)
        build = time.perf_counter() - middle2 - tokenizing
        pairs = []
        for question in questions:
            t0 = time.perf_counter()
            scores = theirs.get_scores(tokenize(question))
            order = [i for i in np.argsort(-scores, kind="stable")[:3] if scores[i] > 0]
            t1 = time.perf_counter()
            hits = ours.search([question])[0]
            pairs.append((t1 - t0, time.perf_counter() - t1))
            assert [h["id"] for h in hits] == [passages[i]["id"] for i in order] and all(abs(h["score"] - scores[i]) < 1e-9 for h, i in zip(hits, order))
        slow, fast = (statistics.median(p[i] for p in pairs) * 1000 for i in (0, 1))
        del theirs, ours
        sizes = [traced_mb(lambda: BM25Retriever(passages)), traced_mb(lambda: LuceneBM25([tokenize(f"{p['title']} {p['text']}") for p in passages]))]
        print(f"bm25, {name}: {len(questions)} questions identical; ms a query: rank_bm25 {slow:.1f}, ours {fast:.2f}, ratio {slow / fast:.0f}; "
              f"index build ours / rank_bm25 {build / (middle - start):.2f}; memory once built ours {sizes[0]:.0f} MB, rank_bm25 {sizes[1]:.0f} MB")


# ----------------------------------------------------------------------------------------------------------------- scale

class Timed:
    """A retriever that counts the seconds spent in it."""

    def __init__(self, retriever):
        self.retriever, self.spent = retriever, 0.0

    def search(self, queries, topk):
        start = time.perf_counter()
        found = self.retriever.search(queries, topk)
        self.spent += time.perf_counter() - start
        return found


def padding(trajectories, cfg):
    """Share of the tokens computed in the training pass that are padding."""
    batches = L.make_minibatches(trajectories, cfg, torch.device("cpu"))
    last = lambda action_ids: int((action_ids > 0).any(0).nonzero().max()) + 1        # token_logps cuts off the rest
    needed = sum(last(row[None]) for batch in batches for row in batch["action_ids"])
    computed = sum(len(rows) * last(batch["action_ids"][rows]) for batch in batches for rows in batch["microbatches"])
    return 1 - needed / computed


def bench_scale(args):
    print(f"{'seconds a step':24}{'rollout':>10}{'of it search':>14}{'log-probs':>12}{'update':>10}{'whole, ratio':>14}{'padding':>10}")
    base = None
    variants = {"default": {}, "group size 10": {"group_size": 10}, "6 turns": {"max_turns": 6, "max_total_tokens": 640},
                "feedback of 6 passages": {"topk": 6, "max_feedback_tokens": 128, "max_total_tokens": 512}, "corpus twice as large": {}}
    for name, changes in variants.items():
        cfg = dataclasses.replace(L.TINY, **changes)
        tokenizer = L.load_tokenizer(cfg.model)
        cfg.chat = "no"
        policy, reference = L.load_policy(cfg.model, torch.device("cpu")), L.load_policy(cfg.model, torch.device("cpu"), trainable=False)
        questions, retriever = L.load_task(cfg)
        if name.startswith("corpus"):
            retriever = BM25Retriever(retriever.passages + [{**p, "id": p["id"] + "b", "title": p["title"] + "b", "text": p["text"].replace(p["title"], p["title"] + "b")}
                                                            for p in retriever.passages])
        optimizer, generator = torch.optim.AdamW(policy.parameters(), lr=1e-6), torch.Generator().manual_seed(0)
        retriever, rows = Timed(retriever), []
        for step in range(6):
            retriever.spent = 0.0
            rows.append({**L.train_step(step, policy, reference, tokenizer, optimizer, generator, [], questions, retriever, cfg), "search": retriever.spent})
        rollout, logps, spent, search = (statistics.median(r[k] for r in rows[1:]) for k in ("seconds_rollout", "seconds_logps", "seconds_update", "search"))
        whole = rollout + logps + spent
        base = base or whole
        sampled = L.rollout(policy, tokenizer, [q for q in questions[:32] for _ in range(cfg.group_size)], retriever, cfg, generator)
        print(f"{name:24}{rollout:10.2f}{search:14.3f}{logps:12.2f}{spent:10.2f}{whole / base:14.2f}{padding(sampled, cfg):10.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rollout", "logps", "logps-side", "bm25", "scale"])
    for option in ("--model", "--corpus", "--questions", "--side"):
        parser.add_argument(option, default="")
    args = parser.parse_args()
    {"rollout": bench_rollout, "logps": bench_logps, "logps-side": lambda a: logps_side(a.side), "bm25": bench_bm25, "scale": bench_scale}[args.what](args)
