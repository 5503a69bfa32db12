"""Evaluate, plot and probe search agents trained by llds_grpo.py.

    python eval.py RUN                         exact match of its last checkpoint on its test questions
    python eval.py Qwen2.5-0.5B --retriever-url URL   a model from the hub on the paper's seven sets (Table 1)
    python eval.py --plot RUN [RUN ...] -o figure.png     Figs. 2, 4 and 9b of runs, also while they go on
    python eval.py --probe RUN -o probe.png    Figs. 3 and 6: one-update displacement, likelihood by rounds
"""
import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from llds_grpo import Config, grpo_loss, make_minibatches, minibatch_logps, rollout, token_logps
from retriever import (BM25Retriever, InputError, Parser, checkpoints, exit_code, load_hotpotqa, load_policy,
                       load_questions, load_retriever, load_task, load_tokenizer, mean, read_config,
                       read_metrics, resolve, split_names)

GENERAL = ["nq", "triviaqa", "popqa"]                                        # Table 1: general QA
MULTI_HOP = ["hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]          # Table 1: multi-hop QA


# ================================================================================================ exact match
def open_policy(path: str, args):
    """(policy, tokenizer, settings, run folder or None) of a run, a checkpoint inside one, or a model."""
    folder = Path(path)
    run = next((f for f in (folder, folder.parent) if (f / "metrics.jsonl").is_file()), None)
    cfg = read_config(run, Config) if run else dataclasses.replace(Config(), model=path)
    if run == folder and not checkpoints(run):
        raise InputError(f"{run} holds no checkpoint yet; it writes one every {cfg.save_every} steps")
    model = str(checkpoints(run)[-1]) if run == folder else path
    options = ("device", "corpus", "retriever_url", "test_data", "rollout_batch", "max_turns")
    cfg = dataclasses.replace(cfg, **{k: v for k, v in vars(args).items() if k in options and v})
    tokenizer = load_tokenizer(model)
    policy = load_policy(model, resolve(cfg, tokenizer), trainable=False)
    positions = getattr(policy.config, "max_position_embeddings", None) or cfg.max_total_tokens
    cfg.max_total_tokens = min(cfg.max_total_tokens, positions)
    return policy, tokenizer, cfg, run


def evaluate(policy, tokenizer, questions, retriever, cfg):
    """Greedy trajectories of all questions, in their order."""
    trajectories = []
    for i in tqdm(range(0, len(questions), cfg.rollout_batch), desc="rollout"):
        part = questions[i:i + cfg.rollout_batch]
        trajectories += rollout(policy, tokenizer, part, retriever, cfg, None, temperature=0.0)
    return trajectories


def table(scores: dict) -> str:
    """One row of the paper's Table 1: exact match per set, then the plain means Gen-Avg, MH-Avg and Avg."""
    columns = [*scores]
    for title, members in (("Gen-Avg", GENERAL), ("MH-Avg", MULTI_HOP)):
        if all(name in scores for name in members):
            scores = {**scores, title: mean([scores[name] for name in members])}
    scores = {**scores, "Avg": mean([scores[name] for name in columns])}
    width = max(map(len, scores)) + 2
    return ("".join(f"{name:>{width}}" for name in scores) + "\n"
            + "".join(f"{value:>{width}.3f}" for value in scores.values()))


def test_sets(cfg, limit: int) -> tuple[dict, object]:
    """({name: test questions}, search engine): the run's own, HotpotQA's own, or the seven of Table 1."""
    if not cfg.corpus and not cfg.retriever_url:
        if cfg.test_data not in ("", "hotpotqa"):
            raise InputError(f"--test-data {cfg.test_data} needs passages: give --corpus FILE or "
                             "--retriever-url URL")
        questions, passages = load_hotpotqa(limit or 1000, cfg.seed, "validation")
        return {"hotpotqa": questions}, BM25Retriever(passages)
    names = split_names(cfg.test_data) if cfg.test_data else GENERAL + MULTI_HOP
    sets = {Path(name).stem: load_questions(name, ("test", "dev"), "--test-data") for name in names}
    return {name: questions[:limit or None] for name, questions in sets.items()}, load_retriever(cfg)


def run_eval(args):
    """Exact match per test set, and the trajectories behind it in predictions.jsonl."""
    policy, tokenizer, cfg, run = open_policy(args.runs[0], args)
    sets, retriever = test_sets(cfg, args.limit)
    path = Path(args.output or (run or Path("runs")) / "predictions.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    scores = {}
    with open(path, "w", encoding="utf-8") as out:
        for name, questions in sets.items():
            trajectories = evaluate(policy, tokenizer, questions, retriever, cfg)
            scores[name] = mean([t.reward for t in trajectories])
            for t in trajectories:
                prompt = tokenizer.decode(t.ids[:t.action_ids.index(1)])
                row = {"set": name, **t.question, "answer": t.answer, "exact_match": t.reward,
                       "searches": t.searches, "prompt": prompt, "turns": t.turns}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(table(scores))
    count = sum(map(len, sets.values()))
    print(f"{count} questions, greedy, at most {cfg.max_turns} tool turns and an answer: {path}")
    if run:
        print(death_spiral(read_metrics(run))["text"])


# ================================================================================= Def. A.3: the death spiral
def course(history, key, least, window=10):
    """How a metric went: its means over `window` steps, the steps where it had fallen, where it turned.

    Fallen: below the best so far by half of it and by `least`. Turned: the last step within a quarter of that
    distance from the best, None if the metric never had a value.
    """
    means, fallen, best = [None] * len(history), [], None
    for i in range(window - 1, len(history)):
        values = [row[key] for row in history[i - window + 1:i + 1] if row.get(key) is not None]
        means[i] = sum(values) / len(values) if values else means[i - 1]                # or the last known
        if means[i] is not None:
            best = means[i] if best is None else max(best, means[i])
            fallen += [i] if means[i] < best - max(least, abs(best) / 2) else []
    near = [i for i, m in enumerate(means) if m is not None and m >= best - max(least, abs(best) / 2) / 4]
    words = f"from {best:.3f} to {means[-1]:.3f}" if near else ""
    return {"means": means, "fallen": fallen, "turned": max(near, default=None), "words": words}


def death_spiral(history, window=10):
    """Def. A.3, Sec. 5.1: which phase a run is in, from its metrics (a list of dicts, one per step).

    r, l: the course of reward and logp_right, by at least 0.05 and 0.02 nats [ours: no thresholds given].
    III, acceleration: both have fallen. II, steady decay: l alone. I, early stagnation, is what came before.
    0: r alone (no likelihood displacement) or neither (healthy; recovered if one had fallen before).
    Returns {"phase": 0 to 3, "since": first step or None, "spans": [(name, first, last)], "text": words}.
    Needs course.
    """
    def verdict(phase, since, spans, text):
        return {"phase": phase, "since": since, "spans": spans, "text": text}

    if len(history) < 2 * window:
        return verdict(0, None, [], f"too short to judge: the phases need {2 * window} steps")
    end = len(history) - 1
    r, l = course(history, "reward", 0.05, window), course(history, "logp_right", 0.02, window)
    if l["turned"] is None:
        return verdict(0, None, [], "no right response in any step: there is no likelihood to judge")
    second, third = l["turned"], max(l["turned"], r["turned"])
    fell = f"the log-likelihood of right responses fell {l['words']} nats per token since step {second}"
    if end in l["fallen"] and end in r["fallen"]:
        return verdict(3, third, [("II", second, third), ("III", third, end)],
                       f"phase III, acceleration: the reward fell {r['words']} since step {third}, {fell}")
    if end in l["fallen"]:
        return verdict(2, second, [("II", second, end)], f"phase II, steady decay: {fell}")
    if end in r["fallen"]:
        return verdict(0, r["turned"], [],
                       f"the reward collapsed {r['words']} since step {r['turned']}, but the likelihood of "
                       "right responses has not fallen: this is no death spiral")
    before = sorted(r["fallen"] + l["fallen"])
    if before:
        return verdict(0, None, [], f"recovered: reward or likelihood had fallen from step {before[0]} to "
                       f"{before[-1]}, both are back")
    return verdict(0, None, [], "healthy: neither reward nor likelihood of right responses has fallen")


# ====================================================================================================== plots
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]     # Okabe and Ito's


def pyplot():
    """matplotlib, which is optional: only the plots need it."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("drawing needs matplotlib, which is optional: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
                         "axes.titlesize": 10, "savefig.dpi": 80})
    return plt


def label(cfg) -> str:
    """What kind of run this is: runs that differ in the seed alone are drawn as one line."""
    name = cfg.objective.upper() + (f" + LLDS, $\\lambda$ = {cfg.llds_lambda:g}" if cfg.llds_lambda else "")
    name += f", {cfg.gate} gate" if cfg.gate != "action" else ""
    return name + (f", beta {cfg.answer_beta}" if cfg.answer_beta != "1" else "")


def load_runs(folders) -> dict:
    """{kind: [history of each seed]}, also of runs that are still going on or died."""
    kinds = {}
    for folder in map(Path, folders):
        if not (folder / "config.json").is_file() or not (folder / "metrics.jsonl").is_file():
            raise InputError(f"{folder} holds no run (config.json and metrics.jsonl)")
        history = read_metrics(folder)
        if history:
            kinds.setdefault(label(read_config(folder, Config)), []).append(history)
    if not kinds:
        raise InputError("no step has been logged yet in any of the runs")
    return kinds


def smooth(values, width=5):
    """Running mean over `width` steps; nan where a run has no value."""
    windows = [[v for v in values[max(0, i - width + 1):i + 1] if v is not None] for i in range(len(values))]
    return [mean(window) if window else float("nan") for window in windows]


def draw(axis, kinds, key):
    """One line per kind: the mean over its seeds, with a band from the lowest to the highest."""
    for colour, (kind, runs) in zip(COLOURS, kinds.items()):
        curves = [smooth([row.get(key) for row in history]) for history in runs]
        steps = range(max(map(len, runs)))
        columns = [[c[i] for c in curves if i < len(c) and c[i] == c[i]] or [float("nan")] for i in steps]
        count = f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
        axis.plot(steps, [mean(column) for column in columns], color=colour, lw=1.8, label=kind + count)
        if len(runs) > 1:
            low, high = [*map(min, columns)], [*map(max, columns)]
            axis.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)


PANELS = [("reward", "Reward (Figs. 2, 7, 8)", "exact match of samples"),
          ("logp_probe", "Likelihood of right responses (Fig. 2)", "nats per token, fixed set"),
          ("ratio_max", "Largest importance ratio (Sec. 5.1)", "log scale"),
          ("entropy", "Entropy (Fig. 4)", "nats per token"),
          ("searches", "Searches (Fig. 9b)", "executed per trajectory")]


def run_plot(args):
    """The runs' metrics, one quantity a panel; dotted: where the likelihood of the runs that died turned."""
    kinds = load_runs(args.runs)
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained")
    for axis, (key, title, unit) in zip(axes.flat, PANELS):
        draw(axis, kinds, key)
        scale = "log" if key == "ratio_max" else "linear"
        axis.set(title=title, xlabel="rollout step", ylabel=unit, yscale=scale)
    for colour, runs in zip(COLOURS, kinds.values()):
        died = [history for history in runs if death_spiral(history)["phase"] == 3]
        turned = [course(h, "logp_probe", 0.05)["turned"] for h in died]
        turned = [step for step in turned if step is not None]
        for axis in axes.flat[:2] if turned else ():
            axis.axvline(mean(turned), color=colour, ls=":", lw=1.5)
    axes.flat[5].axis("off")
    axes.flat[5].legend(*axes.flat[0].get_legend_handles_labels(), loc="center", frameon=False)
    path = args.output or str(Path(args.runs[0]) / "figure.png")
    figure.savefig(path)
    print(path)


# ================================================================================ Eq. 3: probe, Figs. 3 and 6
def displacement_probe(groups, logps_of, loss_of, optimizer):
    """Eq. 3: Delta(x) = 1/N+ sum_{i right} sum_{t,k} [ln pi'(y_itk) - ln pi(y_itk)], one update on x alone.

    groups: one dict per question with rewards (G,) and action_ids (G, T); logps_of(group) -> (G, T) with
    gradient; loss_of(logps, group) -> scalar; optimizer holds the policy's parameters. Every update starts
    from the same weights and optimiser state, which are restored. Returns one float per group, None where all
    rewards are equal.
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


def probe_checkpoint(folder, args, generator):
    """Eq. 3 at one checkpoint: (displacement per mixed question, {tool rounds: NLL per action token})."""
    policy, tokenizer, cfg, _ = open_policy(str(folder), args)
    policy.requires_grad_(True)
    questions, retriever = load_task(cfg)
    questions = questions[:args.limit or 50]                        # the first 50 training questions (Fig. 3)
    cfg = dataclasses.replace(cfg, group_size=8, updates_per_rollout=len(questions))        # 8 rollouts each
    rows = rollout(policy, tokenizer, [q for q in questions for _ in range(8)], retriever, cfg, generator)
    groups, rounds = make_minibatches(rows, cfg, policy.device), {}                       # one question each
    for i, group in enumerate(groups):
        group["rewards"] = torch.tensor([row.reward for row in rows[8 * i:8 * i + 8]])    # (G,)
        logps, _ = minibatch_logps(policy, group, cfg.temperature)                        # (G, T)
        for row, x, ids in zip(rows[8 * i:8 * i + 8], logps, group["action_ids"]):
            rounds.setdefault(len(row.turns) - 1, []).append(-x[ids > 0].mean().item())

    def logps_of(group):                                                                  # (G, T)
        parts = [token_logps(policy, group["input_ids"][part], group["action_ids"][part], cfg.temperature)[0]
                 for part in group["microbatches"]]
        return torch.cat(parts)[torch.cat(group["microbatches"]).argsort()]

    def loss_of(logps, group):
        return grpo_loss(logps, logps.detach(), group["advantages"], group["action_ids"], 8, cfg.clip_eps)

    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    deltas = displacement_probe(groups, logps_of, loss_of, optimizer)
    return [delta for delta in deltas if delta is not None], {k: mean(v) for k, v in sorted(rounds.items())}


def run_probe(args):
    """Figs. 3 and 6 at the checkpoints of a run, as a table and a figure."""
    run = Path(args.runs[0])
    if not checkpoints(run):
        raise InputError(f"{run} holds no checkpoint to probe")
    results = {}
    print("checkpoint    mixed questions   share of Delta(x) < 0   mean Delta(x)   NLL per token by rounds")
    for folder in checkpoints(run):
        deltas, rounds = probe_checkpoint(folder, args, torch.Generator().manual_seed(0))
        results[folder.name.split("-")[1]] = deltas, rounds
        share = f"{mean([float(d < 0) for d in deltas]):.2f}" if deltas else "-"
        by_rounds = "  ".join(f"{k}: {v:.3f}" for k, v in rounds.items())
        print(f"{folder.name:13} {len(deltas):15} {share:>23} {mean(deltas) or 0:15.4f}   {by_rounds}")
    plt = pyplot()
    figure, axes = plt.subplots(1, len(results) + 1, figsize=(3 * len(results) + 3, 3), layout="constrained")
    for axis, (step, (deltas, _)) in zip(axes, results.items()):
        axis.bar(range(len(deltas)), deltas, color=[COLOURS[0] if d < 0 else COLOURS[1] for d in deltas])
        axis.set(title=f"step {step} (Fig. 3)", xlabel="question", ylabel="Delta(x), nats")
    for colour, (step, (_, rounds)) in zip(COLOURS * 9, results.items()):
        axes[-1].plot(list(rounds), list(rounds.values()), "o-", color=colour, label=f"step {step}")
    axes[-1].set(title="NLL by tool rounds (Fig. 6)", xlabel="tool rounds", ylabel="nats per action token")
    axes[-1].legend(frameon=False)
    path = args.output or str(run / "probe.png")
    figure.savefig(path)
    print(path)


def main(argv=None) -> int:
    """The command line. 0, or 2 for bad input."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", help="run folder, checkpoint folder or model; several with --plot")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plot", action="store_true", help="draw the runs' metrics")
    mode.add_argument("--probe", action="store_true", help="Figs. 3 and 6 at the run's checkpoints")
    add("-o", "--output", default="", help="predictions file, or figure (default: in the run folder)")
    add("--test-data", default="", help="hub sets or files joined by +; default: the run's, else all seven")
    add("--corpus", default="", help="passages, .jsonl or .jsonl.gz")
    add("--retriever-url", default="", help="a Search-R1 retrieval server")
    add("--limit", type=int, default=0, help="questions per set; 0 means all")
    add("--max-turns", type=int, default=3, help="tool turns before the last action: 3 make a budget of 4")
    add("--rollout-batch", type=int, default=0, help="rows sampled at a time")
    add("--device", default="", choices=["auto", "cpu", "cuda"])
    def program():
        args = parser.parse_args(argv)
        (run_plot if args.plot else run_probe if args.probe else run_eval)(args)
    return exit_code(program)


if __name__ == "__main__":
    sys.exit(main())
