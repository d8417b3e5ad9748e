# Every target sets itself up: Python 3.11 or newer, make and pip are all it takes.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed
# Python keeps what it compiled: the tests start many processes, each of which would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
PROMPT ?= a photo of a mountain covered in snow under a blue sky

DATA ?= photos
MODEL ?= nature-continuous
TOKENIZER_STEPS ?= 1000
TARGET_STEPS ?= 2000
DRAFTER_STEPS ?= 400
NATURE := src/lanternpp/assets/nature-128
KERNELS := $(wildcard src/lanternpp/kernels/csrc/*.[ch]) src/lanternpp/kernels/kinds.py

.PHONY: demo test gpu continuous lint format docs clean

demo: $(STAMP)
	$(BIN)/lanternpp compare "$(PROMPT)" -n 4 -o out/demo.png

# One process more than cores, as some tests wait for others.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal \
	    -n $$($(BIN)/python -c "import os; print(min(4, os.cpu_count() + 1))")

gpu: $(STAMP)
	$(BIN)/python bench/gpu.py

# A model of continuous latents that begins with nature-128's weights and is judged as it is; DATA is an imagefolder with captions.
continuous: $(STAMP)
	$(BIN)/python recipes/nature/tokenizer.py --data "$(DATA)" --model "$(MODEL)" --kind kl --channels 4 --weights-of nature-128 \
	    --batch-size 16 --no-adversarial --steps $(TOKENIZER_STEPS) --store bfloat16
	$(BIN)/python recipes/nature/target.py --data "$(DATA)" --model "$(MODEL)" --head mixture --weights-of nature-128 --crops 1 \
	    --batch-size 16 --steps $(TARGET_STEPS) --warmup 10 --muon-lr 1e-3 --lr 5e-4 --store bfloat16
	$(BIN)/lanternpp train --data "$(DATA)" --model "$(MODEL)" --kind eagle --steps $(DRAFTER_STEPS) --store bfloat16
	cp -R $(NATURE)/classifier $(NATURE)/prompts.txt "$(MODEL)/"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages and the Python reference. A link that leads nowhere ends it, unless --quiet hides its warning from --strict.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist out src/*.egg-info .pytest_cache .ruff_cache .mypy_cache src/lanternpp/kernels/lib

# The kernels are compiled anew where their sources changed. One constraints file pins every package. It names no build of torch, so a machine with a GPU gets its own.
$(STAMP): pyproject.toml constraints.txt setup.py $(KERNELS)
	@for python in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Setting up $(VENV) with $$($$python --version)"; \
	        $$python -m venv $(VENV) && exit 0; \
	        echo "$$python cannot make a virtual environment; install its venv module" >&2; exit 1; \
	    fi; \
	done; echo "Python 3.11 or newer is needed; install it, or name it: make PYTHON=/path/to/python" >&2; exit 1
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
