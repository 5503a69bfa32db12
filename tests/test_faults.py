"""Killed, interrupted, out of disk, damaged files: nothing lost, one clear sentence."""
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import eval as E
import llds_grpo as L
import retriever as R
from worlds import bpe_tokenizer, tiny_model

PROGRAM = str(Path(L.__file__))
SMALL = ["--steps", "6", "--save-every", "1", "--questions-per-step", "4", "--group-size", "3", "--updates-per-rollout", "2"]


def start(*options, **changes):
    return subprocess.Popen([sys.executable, PROGRAM, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **changes)


def wait_for(path, process):
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)


def timeless(out):
    return [{k: v for k, v in row.items() if "second" not in k} for row in R.read_metrics(out)]


def kill_and_resume(tmp_path, kills, seed, options=()):
    """A run killed with SIGKILL `kills` times at random moments, then finished; and how often a checkpoint was half written."""
    out, rng, torn = tmp_path / "killed", random.Random(seed), 0
    options = ["--out", str(out), *SMALL, *options]
    for _ in range(kills):
        process = start(*options)
        wait_for(out / "config.json", process)
        time.sleep(rng.uniform(0, 2.0))
        process.kill()
        process.communicate()
        torn += (out / "checkpoint.tmp").exists()
        options = ["--resume", str(out)]
    process = start(*options)
    error = process.communicate()[1]
    assert process.returncode == 0, error
    return out, torn


def test_killed_at_random_moments_and_resumed_equals_uninterrupted(tmp_path):
    assert L.main(["--out", str(tmp_path / "whole"), *SMALL]) == 0
    out, _ = kill_and_resume(tmp_path, kills=2, seed=0)
    assert timeless(out) == timeless(tmp_path / "whole")


def test_ctrl_c_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    process = start("--out", str(out), *SMALL[2:], "--steps", "1000")
    wait_for(out / "checkpoint-1", process)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and f"--resume {out}" in error and "Traceback" not in error
    assert L.main(["--resume", str(out), "--steps", str(len(R.read_metrics(out)) + 1)]) == 0


def test_a_full_disk_is_one_sentence_and_keeps_what_was_there(tmp_path):
    out = tmp_path / "run"
    assert L.main(["--out", str(out), *SMALL, "--steps", "1"]) == 0
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))        # a file cannot grow above 1 MB
    process = start("--resume", str(out), "--steps", "3", preexec_fn=limit)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "cannot write" in error and "checkpoint-2" in error and "Traceback" not in error
    assert [p.name for p in L.checkpoints(out)] == ["checkpoint-1"]
    assert L.main(["--resume", str(out), "--steps", "3"]) == 0 and len(R.read_metrics(out)) == 3


@pytest.mark.parametrize("out", ["/dev/null/run", "/proc/run"])
def test_an_unwritable_folder(out, capsys):
    assert L.main(["--out", out, *SMALL]) == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------- damaged files

@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    tokenizer = bpe_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def refused(folder, capsys, *options):
    assert L.main(["--model", str(folder), "--data", L.TINY.data, "--corpus", L.TINY.corpus, "--steps", "1", *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


def test_damaged_models_are_refused(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:len(whole) // 2])                              # half downloaded
    assert "cannot load the model" in refused(checkpoint, capsys)
    weights.unlink()
    assert "cannot load the model" in refused(checkpoint, capsys)
    torch.save({}, checkpoint / "pytorch_model.bin")                          # a pickle is not read
    assert "cannot load the model" in refused(checkpoint, capsys)
    weights.write_bytes(whole)
    settings = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**settings, "hidden_size": 64}))          # another shape
    assert "cannot load the model" in refused(checkpoint, capsys)
    (checkpoint / "config.json").write_text(json.dumps({**settings, "model_type": "gpt2"}))       # another architecture
    assert "cannot load the model" in refused(checkpoint, capsys)
    (checkpoint / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 3}))     # weights missing
    assert "cannot load the model" in refused(checkpoint, capsys)
    (checkpoint / "config.json").write_text(json.dumps(settings))
    (checkpoint / "tokenizer.json").unlink()
    assert "tokenizer" in refused(checkpoint, capsys)


def test_poisoned_weights_are_refused(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = L.load_policy(str(checkpoint), torch.device("cpu"))
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(checkpoint)
    assert "not finite" in refused(checkpoint, capsys, "--max-total-tokens", "600", "--questions-per-step", "4")


def one_sentence(main, arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error and "Traceback" not in error
    return error


def test_a_model_that_is_nowhere_is_refused_at_once(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    start = time.perf_counter()
    for main in (E.main, lambda arguments: L.main(["--model", *arguments])):
        for name in ("RUM", "Qwen2.5-0.5B", "runs/x/checkpoint-3", "not a name"):
            error = one_sentence(main, [name], capsys)
            assert "cannot load" in error and "no folder, and the hub says" in error and name in error
    assert time.perf_counter() - start < 60                                   # not the library's minutes of retries


def test_the_option_that_was_typed_is_named(capsys, tmp_path):
    for main, arguments, named in ((E.main, [L.TINY.model, "--corpus", L.TINY.corpus, "--test-data", "nothere.jsonl"], "--test-data nothere.jsonl"),
                                   (E.main, [L.TINY.model, "--corpus", "nothere.jsonl", "--test-data", L.TINY.test_data], "--corpus nothere.jsonl"),
                                   (L.main, ["--out", str(tmp_path / "a"), "--data", "nothere.parquet"], "--data nothere.parquet"),
                                   (L.main, ["--out", str(tmp_path / "a"), "--corpus", str(tmp_path)], f"--corpus {tmp_path}: this is a folder")):
        assert named in one_sentence(main, arguments, capsys)


def test_a_model_with_too_few_positions_is_refused(capsys, tmp_path):
    error = one_sentence(L.main, ["--out", str(tmp_path / "a"), "--max-total-tokens", "5000"], capsys)
    assert "--max-total-tokens 5000" in error and "512 positions" in error
    assert not (tmp_path / "a").exists()


def test_a_damaged_newest_checkpoint_names_the_one_before(tmp_path, capsys):
    out = tmp_path / "run"
    assert L.main(["--out", str(out), *SMALL, "--steps", "2"]) == 0
    capsys.readouterr()
    newest, metrics = out / "checkpoint-2", (out / "metrics.jsonl").read_text()
    for name in ("trainer.pt", "model.safetensors"):
        whole = (newest / name).read_bytes()
        for content in (whole[:len(whole) // 2], b"", None):
            (newest / name).write_bytes(content) if content is not None else (newest / name).unlink()
            error = one_sentence(L.main, ["--resume", str(out), "--steps", "3"], capsys)
            assert str(newest) in error and "remove" in error and "continue from checkpoint-1" in error
            assert (out / "metrics.jsonl").read_text() == metrics and json.loads((out / "config.json").read_text())["steps"] == 2
        (newest / name).write_bytes(whole)
    shutil.rmtree(newest)                                                     # as the message says
    assert L.main(["--resume", str(out), "--steps", "2"]) == 0 and len(R.read_metrics(out)) == 2


def test_settings_that_are_none_are_one_sentence(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    for text in ("{", "[]", '{"colour": 1}', ""):
        (tmp_path / "config.json").write_text(text)
        for main, arguments in ((L.main, ["--resume", str(tmp_path)]), (E.main, [str(tmp_path)])):
            assert "config.json does not hold" in one_sentence(main, arguments, capsys)


def test_activation_checkpointing_warns_of_nothing(tmp_path, recwarn):
    assert L.main(["--out", str(tmp_path / "a"), *SMALL, "--steps", "1", "--gradient-checkpointing"]) == 0
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


@pytest.mark.parametrize("options", [["--bogus", "1"], ["--steps", "many"], ["--gradient-checkpointing", "maybe"], ["--lr", "-1"], ["--lr", "nan"], ["--step", "3"],
                                     ["--answer-beta", "2"], ["--clip-eps", "0"], ["--llds-lambda", "-0.1"]])
def test_wrong_options_are_one_sentence(options, capsys):
    assert L.main(options) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error and options[0] in error


def test_no_pickle_no_remote_code():
    for name in ("llds_grpo.py", "retriever.py", "eval.py"):
        source = (Path(PROGRAM).parent / name).read_text()
        assert "trust_remote_code" not in source and "import pickle" not in source and " eval(" not in source and "exec(" not in source
        assert source.count("torch.load(") == source.count("weights_only=True")
