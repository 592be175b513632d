"""The scripts in examples/ run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_grpo_in_ten_lines_learns_to_write_digits():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/grpo_in_ten_lines.py")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    rewards = [float(x) for x in re.findall(r"reward ([0-9.]+)", done.stdout)]
    assert len(rewards) == 20
    # An untrained model writes about 10 digits in 265 tokens.
    assert max(rewards[:3]) < 0.2
    assert rewards[-1] > 0.5
