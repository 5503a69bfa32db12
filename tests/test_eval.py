"""eval.py: exact match and its table, plots of running and dead runs, the probe."""
import json
import sys

import pytest

import eval as E
import llds_grpo as L

SMALL = ["--steps", "2", "--save-every", "1", "--questions-per-step", "4", "--group-size", "3", "--updates-per-rollout", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "a"
    assert L.main(["--out", str(out), *SMALL]) == 0
    return out


def test_exact_match_of_a_run_and_of_a_checkpoint(run, capsys):
    assert E.main([str(run), "--limit", "12"]) == 0
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in open(run / "predictions.jsonl", encoding="utf-8")]
    assert len(rows) == 12 and {"set", "question", "golden_answers", "answer", "exact_match", "prompt", "turns"} <= set(rows[0])
    assert f"{sum(r['exact_match'] for r in rows) / 12:.3f}" in printed
    for row in rows:
        assert row["prompt"].strip() == f"Question : {row['question']}" and 1 <= len(row["turns"]) <= 4
        assert row["exact_match"] == L.exact_match(row["answer"], row["golden_answers"])
    assert E.main([str(run / "checkpoint-2"), "--limit", "12", "-o", str(run / "p.jsonl")]) == 0
    assert (run / "p.jsonl").read_text() == (run / "predictions.jsonl").read_text()            # greedy: the same again


def test_a_model_on_local_files(tmp_path, capsys):
    assert E.main([L.TINY.model, "--test-data", L.TINY.test_data, "--corpus", L.TINY.corpus, "--limit", "2", "-o", str(tmp_path / "p.jsonl"), "--rollout-batch", "1"]) == 0
    assert "Avg" in capsys.readouterr().out


def test_table_has_the_papers_averages():
    scores = dict(zip(E.GENERAL + E.MULTI_HOP, [0.421, 0.583, 0.413, 0.297, 0.274, 0.066, 0.128]))       # Table 1, 3B-Base GRPO
    names, values = (line.split() for line in E.table(scores).splitlines())
    row = dict(zip(names, values))
    assert (row["Gen-Avg"], row["MH-Avg"], row["Avg"]) == ("0.472", "0.191", "0.312")
    assert E.table({"test": 0.5}).split() == ["test", "Avg", "0.500", "0.500"]


@pytest.mark.parametrize("arguments, message", [(["nowhere"], "cannot load"), (["--plot", "nowhere"], "holds no run"), (["--probe", "nowhere"], "no checkpoint"),
                                                ([L.TINY.model, "--test-data", "nq"], "needs passages"), (["x", "--bogus"], "--bogus"), ([], "required")])
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert E.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_plot_of_finished_running_and_dead_runs(run, tmp_path):
    pytest.importorskip("matplotlib")
    dead = tmp_path / "dead"
    dead.mkdir()
    (dead / "config.json").write_text((run / "config.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (dead / "metrics.jsonl").write_text(lines[0] + "\n" + lines[1][:40])                       # died while writing
    for runs in ([run], [run, dead], [dead]):
        assert E.main(["--plot", *map(str, runs), "-o", str(tmp_path / "f.png")]) == 0
        assert (tmp_path / "f.png").stat().st_size < 200_000


def test_without_matplotlib_the_message_is_clear(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert E.main(["--plot", str(run)]) == 2 and "pip install matplotlib" in capsys.readouterr().err


def test_probe(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert E.main(["--probe", str(run), "--limit", "6", "-o", str(tmp_path / "probe.png")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint-")]
    assert len(rows) == 2 and (tmp_path / "probe.png").exists()


def test_the_seven_benchmarks_of_the_hub(monkeypatch, tmp_path, capsys):
    import datasets
    splits = {"nq": "test", "triviaqa": "test", "popqa": "test", "hotpotqa": "dev", "2wikimultihopqa": "dev", "musique": "dev", "bamboogle": "test"}
    asked = []

    def load_dataset(repository, name):
        if repository == "hotpotqa/hotpot_qa":
            context = {"title": ["Opal"], "sentences": [["Opal is a stone."]]}
            return datasets.DatasetDict({"validation": datasets.Dataset.from_list([{"id": "1", "question": "what is opal ?", "answer": "stone", "context": context}] * 3)})
        asked.append(name)
        rows = [{"id": f"{name}_{i}", "question": f"who directed film {i} ?", "golden_answers": ["x"]} for i in range(3)]
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows[:1]), splits[name]: datasets.Dataset.from_list(rows)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert E.main([L.TINY.model, "--corpus", L.TINY.corpus, "--limit", "2", "-o", str(tmp_path / "p.jsonl")]) == 0
    assert asked == E.GENERAL + E.MULTI_HOP and len((tmp_path / "p.jsonl").read_text().splitlines()) == 14
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*splits, "Gen-Avg", "MH-Avg", "Avg"])
    assert E.main([L.TINY.model, "-o", str(tmp_path / "h.jsonl")]) == 0                        # without passages: HotpotQA's own
    assert len((tmp_path / "h.jsonl").read_text().splitlines()) == 3 and "hotpotqa" in capsys.readouterr().out
