"""Two long checks that are run by hand, not by pytest.

    python tests/soak.py kill      a run killed with SIGKILL at 20 random moments and resumed equals the one never interrupted
    python tests/soak.py memory    1,000 steps of the default run; prints resident memory at steps 20, 200 and 1,000

A second argument names the folder to write to, which is then kept.
"""
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import retriever as R  # noqa: E402
import llds_grpo as L                                                                                       # noqa: E402
from test_faults import PROGRAM, SMALL, kill_and_resume, timeless                                           # noqa: E402


def kill(folder):
    options = ["--steps", "40"]
    assert L.main(["--out", str(folder / "whole"), *SMALL, *options]) == 0
    out, torn = kill_and_resume(folder, kills=20, seed=1, options=options)
    same = timeless(out) == timeless(folder / "whole")
    print(f"20 kills, {torn} of them while a checkpoint was being written; metrics of 40 steps equal to the uninterrupted run's: {same}")
    return 0 if same else 1


def memory(folder):
    out = folder / "run"
    process = subprocess.Popen([sys.executable, PROGRAM, "--out", str(out), "--steps", "1000"], stderr=subprocess.DEVNULL)
    for step in (20, 200, 1000):
        while process.poll() is None and not ((out / "metrics.jsonl").exists() and len(R.read_metrics(out)) >= step - 1):
            time.sleep(0.2)
        status = Path(f"/proc/{process.pid}/status").read_text()
        print(f"step {step}: {int(status.split('VmRSS:')[1].split()[0]) / 1024:.0f} MiB resident", flush=True)
    return process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit({"kill": kill, "memory": memory}[sys.argv[1]](Path(sys.argv[2] if len(sys.argv) > 2 else temporary)))
