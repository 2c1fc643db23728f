# Two commands set everything up on a bare machine: make demo runs the main job, make test runs the tests.
.PHONY: demo test test-full test-real lint venv clean
SHELL := /bin/bash
export PYTHON312
PYTHON := .venv/bin/python
CONFIG := examples/quickstart/qwen3_moe.yaml
RUN := runs/quickstart/rl-$(shell date +%Y%m%d-%H%M%S)

demo: venv
	$(PYTHON) examples/quickstart/prepare.py $(CONFIG)
	$(PYTHON) -m megatron_rlzero train $(CONFIG) run_dir=$(RUN)
	$(PYTHON) examples/quickstart/compare.py $(CONFIG) $(RUN)

# two at a time, each file by one worker: most tests wait for processes of one thread each; the long files come first
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# the second time every Triton kernel, interpreted
test: venv
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels

test-full: venv
	$(PYTEST) -m "not real"

# downloads the weights of SmolLM2-135M-Instruct, 93 MB
test-real: venv
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m real

lint: venv
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

venv: .venv/installed

# Everything comes from the lock file, so nothing is resolved here; uv makes a minute of what takes pip ten.
.venv/installed: constraints/cpu.txt constraints/uv.txt setup.py
	@python=$$(./tools/find_python) || exit 1; \
	test -x $(PYTHON) || $$python -m venv .venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -r constraints/uv.txt \
	  && .venv/bin/uv pip install --quiet --python $(PYTHON) --no-deps --compile-bytecode -r constraints/cpu.txt \
	  && .venv/bin/uv pip install --quiet --python $(PYTHON) --no-deps --no-build-isolation -e . \
	  || { echo "The installation failed. It needs a package index (pip's settings count for pip, UV_INDEX_URL for uv)," \
	            "about 7 GB of disk and Linux on x86_64; 'make clean' starts over." >&2; exit 1; }
	@touch $@

clean:
	rm -rf .venv build *.egg-info
