"""Evaluate, plot and probe search agents trained by llds_grpo.py.

    python eval.py RUN                          exact match of the run's last checkpoint (or of a model) on its test questions
    python eval.py Qwen2.5-0.5B --retriever-url URL      a model from the hub on the paper's seven benchmarks (Table 1)
    python eval.py --plot RUN [RUN ...] -o figure.png    Figs. 2, 4 and 5 of one or many runs, also while they are running
    python eval.py --probe RUN -o probe.png     Figs. 3 and 6: one-update displacement and likelihood against tool rounds
"""
import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from llds_grpo import (TINY, Config, checkpoints, death_spiral, displacement_probe, group_advantages, grpo_loss, hub_name,
                       load_hotpotqa, load_policy, load_questions, load_retriever, load_task, load_tokenizer, make_minibatches,
                       mean, minibatch_logps, microbatch_logps, read_metrics, resolve, rollout)
from retriever import BM25Retriever, InputError, RetrieverError

GENERAL = ["nq", "triviaqa", "popqa"]                                        # Table 1: general QA
MULTI_HOP = ["hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]          # Table 1: multi-hop QA


# ============================================================================================================ exact match

def open_policy(path: str, args):
    """(policy, tokenizer, config, checkpoint folder or hub name) of a run folder, a checkpoint inside one, or a model."""
    folder = Path(path)
    run = next((f for f in (folder, folder.parent) if (f / "metrics.jsonl").is_file()), None)
    if run:
        cfg = Config(**json.loads((run / "config.json").read_text(encoding="utf-8")))
        if folder == run and not checkpoints(run):
            raise InputError(f"{run} holds no checkpoint yet; it writes one every {cfg.save_every} steps")
        model = str(checkpoints(run)[-1] if folder == run else folder)
    else:
        cfg = dataclasses.replace(Config(), model=path)
        model = hub_name(path)
    given = {k: v for k, v in vars(args).items() if k in ("device", "corpus", "retriever_url", "test_data", "rollout_batch") and v}
    cfg = dataclasses.replace(cfg, **given)
    tokenizer = load_tokenizer(model)
    device = resolve(cfg, tokenizer)
    return load_policy(model, device, trainable=False), tokenizer, cfg, run


def evaluate(policy, tokenizer, questions, retriever, cfg, max_turns):
    """Greedy trajectories of all questions, in their order."""
    trajectories = []
    for i in tqdm(range(0, len(questions), cfg.rollout_batch), desc="rollout"):
        trajectories += rollout(policy, tokenizer, questions[i:i + cfg.rollout_batch], retriever, cfg, None, 0.0, max_turns)
    return trajectories


def table(scores: dict) -> str:
    """One row of the paper's Table 1: exact match per set, then the plain means Gen-Avg, MH-Avg and Avg."""
    columns = [*scores]
    for title, members in (("Gen-Avg", GENERAL), ("MH-Avg", MULTI_HOP)):
        if all(name in scores for name in members):
            scores = {**scores, title: mean([scores[name] for name in members])}
    scores = {**scores, "Avg": mean([scores[name] for name in columns])}
    width = max(map(len, scores)) + 2
    return "".join(f"{name:>{width}}" for name in scores) + "\n" + "".join(f"{value:>{width}.3f}" for value in scores.values())


def run_eval(args):
    policy, tokenizer, cfg, run = open_policy(args.runs[0], args)
    if not cfg.corpus and not cfg.retriever_url:
        if cfg.test_data not in ("", "hotpotqa"):
            raise InputError(f"--test-data {cfg.test_data} needs passages: give --corpus FILE or --retriever-url URL")
        questions, passages = load_hotpotqa(args.limit or 1000, cfg.seed, "validation")
        retriever, sets = BM25Retriever(passages), {"hotpotqa": questions}
    else:
        retriever = load_retriever(cfg)
        names = cfg.test_data.split("+") if cfg.test_data else GENERAL + MULTI_HOP
        sets = {Path(name).stem: load_questions(name, splits=("test", "dev")) for name in names}
    sets = {name: questions[:args.limit or None] for name, questions in sets.items()}
    path = Path(args.output or (run or Path("runs")) / "predictions.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    scores = {}
    with open(path, "w", encoding="utf-8") as out:
        for name, questions in sets.items():
            trajectories = evaluate(policy, tokenizer, questions, retriever, cfg, args.max_turns)
            scores[name] = mean([t.reward for t in trajectories])
            for t in trajectories:
                out.write(json.dumps({"set": name, **t.question, "answer": t.answer, "exact_match": t.reward, "searches": t.searches,
                                      "prompt": tokenizer.decode(t.ids[:t.action_ids.index(1)] if 1 in t.action_ids else t.ids),
                                      "turns": t.turns}, ensure_ascii=False) + "\n")
    print(table(scores))
    print(f"{sum(map(len, sets.values()))} questions, greedy, at most {args.max_turns} tool turns and an answer; trajectories: {path}")
    return scores


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folder, checkpoint folder or model; several with --plot")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plot", action="store_true", help="draw the runs' metrics")
    mode.add_argument("--probe", action="store_true", help="Figs. 3 and 6 at the run's checkpoints")
    parser.add_argument("-o", "--output", default="", help="predictions file, or figure (default: in the run folder)")
    parser.add_argument("--test-data", default="", help="hub sets or local files joined by +; default: the run's, else all seven")
    parser.add_argument("--corpus", default="", help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--retriever-url", default="", help="a Search-R1 retrieval server")
    parser.add_argument("--limit", type=int, default=0, help="questions per set; 0 means all")
    parser.add_argument("--max-turns", type=int, default=3, help="tool turns before the last action: 3 make the paper's action budget of 4")
    parser.add_argument("--rollout-batch", type=int, default=0, help="rows sampled at a time")
    parser.add_argument("--device", default="", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args(argv)
    try:
        (run_plot if args.plot else run_probe if args.probe else run_eval)(args)
    except (InputError, RetrieverError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
