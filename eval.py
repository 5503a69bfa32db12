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
import transformers
from tqdm import tqdm

from llds_grpo import (Config, Parser, checkpoints, death_spiral, displacement_probe, grpo_loss, hub_name, load_policy, load_retriever,
                       load_task, load_tokenizer, make_minibatches, mean, microbatch_logps, minibatch_logps, read_metrics, resolve, rollout)
from retriever import BM25Retriever, InputError, RetrieverError, load_hotpotqa, load_questions

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


# ================================================================================================================== plots

def pyplot():
    """matplotlib, which is optional: only the plots need it."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("drawing needs matplotlib, which is optional: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams["savefig.dpi"] = 80                                            # readable at the width of a README
    return plt


COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]     # Okabe and Ito: safe for the colour-blind


def label(cfg) -> str:
    """What kind of run this is: runs that differ in the seed alone are drawn as one line."""
    name = cfg.objective.upper() + (f" + LLDS, $\\lambda$ = {cfg.llds_lambda:g}" if cfg.llds_lambda else "")
    return name + (f", {cfg.gate} gate" if cfg.gate != "action" else "") + (f", beta {cfg.answer_beta}" if cfg.answer_beta != "1" else "")


def load_runs(folders) -> dict:
    """{kind: [history of each seed]}, also of runs that are still going on or died."""
    kinds = {}
    for folder in map(Path, folders):
        if not (folder / "config.json").is_file() or not (folder / "metrics.jsonl").is_file():
            raise InputError(f"{folder} holds no run (config.json and metrics.jsonl)")
        history = read_metrics(folder)
        if history:
            kinds.setdefault(label(Config(**json.loads((folder / "config.json").read_text(encoding="utf-8")))), []).append(history)
    if not kinds:
        raise InputError("no step has been logged yet in any of the runs")
    return kinds


def smooth(values, width=5):
    """Running mean over `width` steps; nan where a run has no value."""
    padded = [values[max(0, i - width + 1):i + 1] for i in range(len(values))]
    means = [mean([v for v in window if v is not None]) for window in padded]
    return [float("nan") if m is None else m for m in means]


def draw(axis, kinds, key, style="-", name=""):
    """One line per kind: the mean over its seeds, with a band from the lowest to the highest."""
    for colour, (kind, runs) in zip(COLOURS, kinds.items()):
        steps = max(map(len, runs))
        curves = [smooth([row.get(key) for row in history]) for history in runs]
        columns = [[c[i] for c in curves if i < len(c) and c[i] == c[i]] for i in range(steps)]
        middle = [mean(column) if column else float("nan") for column in columns]
        axis.plot(range(steps), middle, style, color=colour, lw=1.6, label=f"{kind}{name}")
        if len(runs) > 1:
            axis.fill_between(range(steps), [min(c, default=float("nan")) for c in columns], [max(c, default=float("nan")) for c in columns],
                              color=colour, alpha=0.15, lw=0)


def run_plot(args):
    kinds = load_runs(args.runs)
    plt = pyplot()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10})
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained")
    reward, likelihood, gradient, entropy, search, action = axes.flat
    draw(reward, kinds, "reward")
    reward.set(title="Reward (Figs. 2, 7, 8)", ylabel="exact match of samples", ylim=(0, None))
    draw(likelihood, kinds, "logp_right", name=", right")
    draw(likelihood, kinds, "logp_wrong", ":", name=", wrong")
    likelihood.set(title="Log-likelihood: right (line), wrong (dots) (Figs. 2, 9a)", ylabel="nats per action token")
    histories = [history for runs in kinds.values() for history in runs]
    for name, start, stop in death_spiral(histories[0])["spans"] if len(histories) == 1 else ():     # phases of a single run
        for axis in (reward, likelihood, gradient):
            axis.axvspan(start, stop, color={"II": "#E69F00", "III": "#D55E00"}[name], alpha=0.12, lw=0)
    draw(gradient, kinds, "grad_norm")
    draw(gradient, kinds, "ratio_max", ":")
    gradient.set(title="Gradient norm (line), largest ratio (dots) (Fig. 2)", ylabel="log scale", yscale="log")
    draw(entropy, kinds, "entropy")
    entropy.set(title="Entropy (line), action length (dashes) (Fig. 4)", ylabel="nats per action token")
    twin = entropy.twinx()
    draw(twin, kinds, "action_tokens", "--")
    twin.set(ylabel="tokens per action", ylim=(0, None))
    draw(search, kinds, "searches")
    search.set(title="Searches per trajectory (Figs. 4, 9b)", ylabel="executed searches", ylim=(0, None))
    draw(action, kinds, "logp_right_action1")
    draw(action, kinds, "logp_right_action2", "--")
    action.set(title="1st action (line), 2nd (dashes); matches (dots) (Fig. 5)", ylabel="nats per action token")
    twin = action.twinx()
    draw(twin, kinds, "match_ratio", ":")
    twin.set(ylabel="match ratio of wrong responses", ylim=(0, 1.02))
    for axis in axes.flat:
        axis.set_xlabel("rollout step")
    handles, names = reward.get_legend_handles_labels()
    counts = [f"{name} ({len(runs)} seed{'s' * (len(runs) > 1)})" for name, runs in zip(names, kinds.values())]
    figure.legend(handles, counts, loc="outside lower center", ncols=min(4, len(names)), frameon=False)
    path = args.output or str(Path(args.runs[0]) / "figure.png")
    figure.savefig(path)
    print(path)


# ================================================================================================= probe: Figs. 3 and 6

def probe_checkpoint(folder, args, generator):
    """Eq. 3 at one checkpoint: (one-update displacement per mixed question, {tool rounds: NLL per action token})."""
    policy, tokenizer, cfg, _ = open_policy(str(folder), args)
    cfg = dataclasses.replace(cfg, group_size=8, updates_per_rollout=1)              # 8 rollouts per question (Fig. 3)
    policy.requires_grad_(True)
    questions, retriever = load_task(cfg)
    questions = questions[:args.limit or 50]                                         # the first 50 training questions (Figs. 3, 6)
    trajectories = rollout(policy, tokenizer, [q for q in questions for _ in range(8)], retriever, cfg, generator)
    groups, rounds = [], {}
    for i in range(0, len(trajectories), 8):
        rows = trajectories[i:i + 8]
        batch, = make_minibatches(rows, dataclasses.replace(cfg, questions_per_step=1), policy.device)
        logps, _ = minibatch_logps(policy, batch)
        for row, t, ids in zip(logps, rows, batch["action_ids"]):
            rounds.setdefault(len(t.turns) - 1, []).append(-row[ids > 0].mean().item())
        groups.append({"rewards": torch.tensor([t.reward for t in rows]), "action_ids": batch["action_ids"], "batch": batch})

    def logps_of(group):
        parts = [(rows, microbatch_logps(policy, group["batch"], rows, length)[0]) for rows, length in group["batch"]["microbatches"]]
        order = torch.tensor([i for rows, _ in parts for i in rows], device=policy.device)
        return torch.cat([logps for _, logps in parts])[order.argsort()]                          # (G, T)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    loss_of = lambda logps, g: grpo_loss(logps, logps.detach(), g["batch"]["advantages"], g["action_ids"], 8, cfg.clip_eps)
    deltas = [d for d in displacement_probe(groups, logps_of, loss_of, optimizer) if d is not None]
    return deltas, {k: mean(v) for k, v in sorted(rounds.items())}


def run_probe(args):
    run = Path(args.runs[0])
    if not checkpoints(run):
        raise InputError(f"{run} holds no checkpoint to probe")
    results = {}
    print("checkpoint   mixed questions   share whose right responses lose likelihood   mean Delta(x)   NLL per token by tool rounds")
    for folder in checkpoints(run):
        deltas, rounds = probe_checkpoint(folder, args, torch.Generator().manual_seed(0))
        results[folder.name.split("-")[1]] = deltas, rounds
        share = "-" if not deltas else f"{mean([float(d < 0) for d in deltas]):.2f}"
        print(f"{folder.name:12} {len(deltas):15} {share:>46} {mean(deltas) or 0:15.4f}   {'  '.join(f'{k}: {v:.3f}' for k, v in rounds.items())}")
    plt = pyplot()
    figure, axes = plt.subplots(1, len(results) + 1, figsize=(3 * len(results) + 3, 3), layout="constrained")
    for axis, (step, (deltas, _)) in zip(axes, results.items()):
        axis.bar(range(len(deltas)), deltas, color=[COLOURS[0] if d < 0 else COLOURS[1] for d in deltas])
        axis.set(title=f"step {step} (Fig. 3)", xlabel="question", ylabel="Delta(x), nats")
    for colour, (step, (_, rounds)) in zip(COLOURS * 9, results.items()):
        axes[-1].plot(list(rounds), list(rounds.values()), "o-", color=colour, label=f"step {step}")
    axes[-1].set(title="NLL against tool rounds (Fig. 6)", xlabel="tool rounds", ylabel="nats per action token")
    axes[-1].legend(frameon=False)
    path = args.output or str(run / "probe.png")
    figure.savefig(path)
    print(path)


def main(argv=None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
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
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        args = parser.parse_args(argv)
        (run_plot if args.plot else run_probe if args.probe else run_eval)(args)
    except (InputError, RetrieverError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
