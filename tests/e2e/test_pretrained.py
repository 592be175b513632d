"""A real pretrained model, SmolLM2-135M-Instruct from its GGUF file (`make smollm2`), through all stages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SHORT = [
    "stages.cold-start.data.count=96",
    "stages.cold-start.epochs=1",
    "stages.reason-rl.steps=1",
    "stages.select.prompts=8",
    "stages.select.keep=best",
    "stages.select-sft.epochs=1",
    "stages.final-rl.steps=1",
    "stages.report.prompts=16",
    "stages.report.samples=1",
]


@pytest.mark.slow
def test_all_stages_run_on_a_pretrained_model(tmp_path):
    if not MODEL.exists():
        pytest.fail("the model is not there; fetch it with: make smollm2")
    run = tmp_path / "run"
    subprocess.run(
        [sys.executable, "-m", "groupwise", "run", "recipes/smollm2-arithmetic.yaml", *SHORT, "--dir", str(run)],
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    models = json.loads((run / "06-report" / "eval.json").read_text())["models"]
    # Without a cold start it does not write the tags; after a hundred examples it does.
    assert models["base"]["format"] < 0.2
    assert models["cold-start"]["format"] > 0.7
    model = AutoModelForCausalLM.from_pretrained(run / "05-final-rl" / "model")
    assert model.num_parameters() == 134_515_008
    assert AutoTokenizer.from_pretrained(run / "05-final-rl" / "model").chat_template
