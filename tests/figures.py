"""Makes the README's tables and figure of the tiny world: runs what is missing, two at a time, then prints.

    python tests/figures.py run      every run of RUNS that is not finished; a line of runs/results.jsonl for each
    python tests/figures.py table    the tables, from the runs that are there
    python tests/figures.py figure   tests/figure.png, from the runs of GRPO and LLDS

Killed and started again, `run` skips the finished runs and resumes the others. One thread a run: another number of
threads rounds differently and makes another run.
"""
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import eval as E                                                                                            # noqa: E402
import llds_grpo as L                                                                                       # noqa: E402
from retriever import read_metrics                                                             # noqa: E402

STEPS, LONG, FIVE, THREE = L.TINY.steps, 300, range(5), range(3)
RUNS = {                                                      # name: (options, seeds, steps)
    "grpo": (["--llds-lambda", "0"], FIVE, STEPS), "llds": ([], FIVE, LONG),
    "lambda0.01": (["--llds-lambda", "0.01"], THREE, STEPS), "lambda0.1": (["--llds-lambda", "0.1"], THREE, STEPS),
    "response": (["--gate", "response"], THREE, STEPS), "token": (["--gate", "token"], THREE, STEPS),
    "ma": (["--answer-beta", "adaptive"], THREE, STEPS),
    "gspo": (["--objective", "gspo", "--llds-lambda", "0"], THREE, STEPS), "gspo-llds": (["--objective", "gspo"], THREE, STEPS)}


def folder(name, seed):
    return ROOT / "runs" / f"{name}-seed{seed}"


def make(name, seed):
    """Train one run, evaluate it after STEPS and at its end, and write a line of results."""
    options, _, steps = RUNS[name]
    out, environment = folder(name, seed), {**os.environ, "OMP_NUM_THREADS": "1"}
    start = ["--resume", str(out)] if (out / "config.json").exists() else [*options, "--seed", str(seed), "--out", str(out)]
    call = lambda *arguments: subprocess.run([sys.executable, *map(str, arguments)], check=True, cwd=ROOT, env=environment, capture_output=True)
    if not (out / f"checkpoint-{steps}").exists():
        call("llds_grpo.py", *start, "--steps", steps, "--save-every", STEPS // 2)
    scores = {}
    for step in {STEPS, steps}:
        path = out / f"predictions-{step}.jsonl"
        call("eval.py", out / f"checkpoint-{step}", "-o", path)
        rows = [json.loads(line) for line in open(path, encoding="utf-8")]
        scores[f"exact_match_{step}"] = statistics.mean(row["exact_match"] for row in rows)
    with open(ROOT / "runs" / "results.jsonl", "a", encoding="utf-8") as results:
        results.write(json.dumps({"name": name, "seed": seed, **scores}) + "\n")


def results() -> dict:
    path = ROOT / "runs" / "results.jsonl"
    rows = [json.loads(line) for line in open(path, encoding="utf-8")] if path.exists() else []
    return {(row["name"], row["seed"]): row for row in rows}


def run():
    missing = [(name, seed) for name, (_, seeds, _) in RUNS.items() for seed in seeds if (name, seed) not in results()]
    with ThreadPoolExecutor(2) as pool:
        for job, done in [(job, pool.submit(make, *job)) for job in missing]:
            done.result()
            print("finished", *job, flush=True)


def figures(name, seed, steps=STEPS) -> dict:
    """What the tables show of one run's first `steps` steps; means of ten steps."""
    history = read_metrics(folder(name, seed))[:steps]
    reward, probe = (E.course(history, key, least)["means"] for key, least in (("reward", 0.05), ("logp_probe", 0.05)))
    best = max(range(9, len(reward)), key=reward.__getitem__)
    return {"em": results()[name, seed][f"exact_match_{steps}"], "best": reward[best], "best_end": best, "last": reward[-1],
            "turned": E.course(history, "logp_probe", 0.05)["turned"], "survivors": E.course(history, "logp_right", 0.02)["turned"],
            "probe": probe[-1], "probe_best": max(x for x in probe if x is not None), "ratio": max(row["ratio_max"] for row in history),
            "searches": statistics.mean(row["searches"] for row in history[-10:]), "text": E.death_spiral(history)["text"]}


def dot(x, digits=2):
    return f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"


def table():
    done = results()
    print("| seed | test exact match | best reward | last reward | likelihood turns at, reward's best ends at | likelihood, best | last | largest ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in FIVE:
        if ("grpo", seed) in done and ("llds", seed) in done:
            a, b = figures("grpo", seed), figures("llds", seed)
            cells = [f"{dot(a[k], d)} / {dot(b[k], d)}" for k, d in (("em", 2), ("best", 2), ("last", 2), ("probe_best", 3), ("probe", 2))]
            order = f"{a['turned']}, {a['best_end']}"
            print(f"| {seed} | {' | '.join(cells[:3])} | {order} | {' | '.join(cells[3:])} | {a['ratio']:.0f} / {b['ratio']:.0f} |")
    print("\n| variant | seeds | test exact match | last reward / best | collapsed | likelihood, last | searches |\n|---|---|---|---|---|---|---|")
    for name, (_, seeds, steps) in RUNS.items():
        for length in sorted({STEPS, steps}):
            rows = [figures(name, seed, length) for seed in seeds if (name, seed) in done]
            if rows:
                spread = lambda key: f"{dot(statistics.mean(r[key] for r in rows))} ({dot(min(r[key] for r in rows))} to {dot(max(r[key] for r in rows))})"
                collapsed = sum(r["last"] < r["best"] / 2 for r in rows)
                print(f"| {name}, {length} steps | {len(rows)} | {spread('em')} | {spread('last')} / {spread('best')} | {collapsed} of {len(rows)} "
                      f"| {spread('probe')} | {spread('searches')} |")
    for name, seed in done:
        print(name, seed, figures(name, seed, RUNS[name][2])["text"], f"likelihood of the survivors turned at {figures(name, seed)['survivors']}", sep=": ")


def figure():
    runs = [str(folder(name, seed)) for name in ("grpo", "llds") for seed in FIVE]
    assert E.main(["--plot", *runs, "-o", str(ROOT / "tests" / "figure.png")]) == 0


if __name__ == "__main__":
    {"run": run, "table": table, "figure": figure}[sys.argv[1]]()
