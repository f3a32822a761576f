# Needs python3 (3.11 or newer) and make; everything else goes into .venv. `make` lists the entries.
PYTHON ?= python3
BIN := .venv/bin
# The stamp carries a checksum of what was installed and where: unchanged pins mean no install and no network.
SUM := $(shell cat constraints.txt dev/requirements.txt packages/*/pyproject.toml | (cat; pwd) | cksum | cut -d' ' -f1)
STAMP := .venv/.setup-done-$(SUM)
# All parts, from this checkout, for one pip command.
PARTS := -e "packages/paceline[notebook,tensorboard]" -e "packages/paceline-hosts[kubernetes,ray,s3]" -e "packages/paceline-large[fp8]" -e "packages/paceline-lens[completion]" \
	-e packages/paceline-doors -e packages/paceline-accelerate -e packages/paceline-deepspeed
# A file is read by one worker (loadscope), so that what its fixtures make is made once; groups are not honoured by
# pytest-xdist 3.8 under pytest 9.2, which keeps names elsewhere. Test processes spend much of their time waiting
# for each other, so four on 2 cores; six were no faster. `make test JOBS=8` on a larger machine.
JOBS ?= 4
# Those of each part, and in tests/together those of parts that do not depend on each other.
UNIT := $(wildcard packages/*/tests/unit)
RANKS := $(wildcard packages/*/tests/ranks) tests/together
COMPAT := $(wildcard packages/*/tests/compat)
ARGS ?=
PYTEST = $(BIN)/python -m pytest
export OMP_NUM_THREADS ?= 1
# Huge pages: forks of a large process, which most tests need, copy a fifth as many entries of page tables (a fifth of the
# processor time of the tests in ranks/).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Where it is set, each process of a test compiles all of our sources anew (0.15 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test test-all test-long test-part test-torch huggingface check ranks ranks-alone loops programs hosts trackers gpu simulated-device docs coverage mutants package release bench bench-deepspeed sweep chaos clean
.DEFAULT_GOAL := help

help:  ## list these entries
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1\t\2/p' Makefile | expand -t 24

# Compiling all modules of all packages takes half of the time; those that are imported are compiled then.
PIP_INSTALL = -m pip install --quiet --no-compile

setup: $(STAMP)  ## make .venv with the pinned dependencies and the `paceline` command

# Two pips at a time, as each unpacks on one core. constraints.txt names all dependencies, so that none has to be resolved; among
# them is peft, which would bring accelerate, whose place Paceline takes. The second command adds what another Python needs besides.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	grep -v '^#' constraints.txt | sort --reverse | xargs -n 22 -P 2 $(BIN)/python $(PIP_INSTALL) --no-deps --no-warn-conflicts
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -r dev/requirements.txt $(PARTS)
	rm -f .venv/.setup-done-*
	touch $@

# Where nothing was set up yet, what the example imports is enough: the tests need 170 packages (2.2 GB).
QUICKSTART = $(if $(wildcard $(STAMP)),.venv,.venv-quickstart)
QUICKSTART_STAMP = $(QUICKSTART)/.setup-done-$(SUM)

.venv-quickstart/.setup-done-$(SUM):
	test -x .venv-quickstart/bin/python || $(PYTHON) -m venv .venv-quickstart
	.venv-quickstart/bin/python $(PIP_INSTALL) -c constraints.txt -e packages/paceline -e packages/paceline-lens pillow scikit-learn tqdm
	rm -f .venv-quickstart/.setup-done-*
	touch $@

quickstart: $(QUICKSTART_STAMP)  ## train a small network on handwritten digits, on 2 processes; writes a report under runs/
	$(QUICKSTART)/bin/python examples/quickstart/make_digits.py
	$(QUICKSTART)/bin/paceline launch --procs 2 examples/quickstart/train.py $(ARGS)

# Files in the order of conftest.py: those with few cases may take long, and would be left for the end.
SUITE = $(PYTEST) -m "not long" -n $(JOBS) --dist loadscope --no-loadscope-reorder

test: setup  ## run the tests that the changes since the last whole run can reach (set-up included); says how many these are
	$(BIN)/python tests/choose_tests.py > .chosen-tests
	$(SUITE) @.chosen-tests $(ARGS)

test-all: setup  ## run the whole test suite: before a release, and before an issue is closed; commit dev/whole-run then
	$(SUITE) $(ARGS)
	@git diff --quiet HEAD && git rev-parse HEAD > dev/whole-run || echo "dev/whole-run is as before: there are changes that are not committed"

test-long: setup  ## run the cases that test-all leaves out, as they add little to their neighbours: each night, and before a release
	$(PYTEST) -m long -n $(JOBS) --dist loadscope --no-loadscope-reorder $(ARGS)

PART ?=
test-part:  ## build and install one part with its dependencies alone, and run its tests: make test-part PART=paceline-large
	$(PYTHON) dev/test_part.py "$(PART)" -m "not long" -n $(JOBS) --dist loadscope --no-loadscope-reorder $(ARGS)

# An environment for each release, named after it and after the Python where that is not 3.11: .venv-torch-2.15.0-py312.
TORCH ?=
TORCH_ENV = .venv-torch-$(TORCH)$(shell $(PYTHON) -c "import sys; v = sys.version_info; print('' if v[:2] == (3, 11) else f'-py{v[0]}{v[1]}')")
TORCH_STAMP = $(TORCH_ENV)/.setup-done-$(SUM)
TORCH_PIP = $(TORCH_ENV)/bin/python -m pip install --quiet -c $(TORCH_ENV)/constraints.txt
TORCH_TESTS := $(UNIT) $(COMPAT) \
	$(wildcard $(foreach name,checkpoint_ranks parity parity_plans profiles res*,packages/*/tests/ranks/test_$(name).py))

test-torch:  ## unit, parity, checkpoint and door tests under another torch: make test-torch TORCH=2.15.0 [PYTHON=python3.12]
	@test -n "$(TORCH)" || { echo "say which release of torch: make test-torch TORCH=2.15.0"; exit 2; }
	@$(PYTHON) --version
	@test -e $(TORCH_STAMP) || $(MAKE) --no-print-directory $(TORCH_STAMP)
	$(TORCH_ENV)/bin/python -m paceline env
	$(TORCH_ENV)/bin/python -m pytest $(TORCH_TESTS) -m "not long" -n $(JOBS) --dist loadscope $(ARGS)

.venv-torch-%/.setup-done-$(SUM):
	test -x $(TORCH_ENV)/bin/python || $(PYTHON) -m venv $(TORCH_ENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_PIP) torch
	$(TORCH_PIP) hatchling editables
	$(TORCH_PIP) --no-build-isolation -r dev/requirements.txt $(PARTS)
	$(TORCH_PIP) --no-deps peft
	rm -f $(TORCH_ENV)/.setup-done-*
	touch $@

# Two environments that differ in one thing: the first has accelerate, the second has Paceline in its place.
HF_PIP = -m pip install --quiet -c constraints.txt
HF_LIBRARIES := transformers datasets sentence-transformers==6.2.0 diffusers==0.42.1 tensorboard torchdata
HF_WITHOUT_ACCELERATE := peft trl==1.16.0
# Without dependencies, which would bring a second torch.
HF_DEEPSPEED := deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo pydantic pydantic-core annotated-types typing-inspection

# Other lists than those of the last time mean another installation.
HF_SUM := $(SUM)-$(shell echo $(HF_LIBRARIES) $(HF_WITHOUT_ACCELERATE) $(HF_DEEPSPEED) | cksum | cut -d' ' -f1)
HF_STAMP := .setup-done-$(HF_SUM)

huggingface: .venv-hf-real/$(HF_STAMP) .venv-hf-deepspeed/$(HF_STAMP) .venv-hf-ours/$(HF_STAMP)  ## train with transformers, peft, trl under accelerate and under Paceline; compare each step
	.venv-hf-ours/bin/python tests/huggingface/compare.py $(ARGS)

.venv-hf-real/$(HF_STAMP):
	test -x .venv-hf-real/bin/python || $(PYTHON) -m venv .venv-hf-real
	.venv-hf-real/bin/python $(HF_PIP) torch
	.venv-hf-real/bin/python $(HF_PIP) accelerate==1.15.0 $(HF_LIBRARIES) $(HF_WITHOUT_ACCELERATE)
	rm -f .venv-hf-real/.setup-done*
	touch $@

# Packages beside those of the first environment: with DeepSpeed in it, accelerate would import it in every case.
.venv-hf-deepspeed/$(HF_STAMP): .venv-hf-real/$(HF_STAMP)
	.venv-hf-real/bin/python $(HF_PIP) setuptools wheel ninja
	DS_ACCELERATOR=cpu .venv-hf-real/bin/python $(HF_PIP) --no-build-isolation --no-deps --upgrade --target .venv-hf-deepspeed $(HF_DEEPSPEED)
	rm -f .venv-hf-deepspeed/.setup-done*
	touch $@

.venv-hf-ours/$(HF_STAMP):
	test -x .venv-hf-ours/bin/python || $(PYTHON) -m venv .venv-hf-ours
	.venv-hf-ours/bin/python $(HF_PIP) torch
	.venv-hf-ours/bin/python $(HF_PIP) hatchling editables
	.venv-hf-ours/bin/python $(HF_PIP) --no-build-isolation $(PARTS) $(HF_LIBRARIES) jinja2 psutil
	.venv-hf-ours/bin/python $(HF_PIP) --no-deps $(HF_WITHOUT_ACCELERATE)
	rm -f .venv-hf-ours/.setup-done*
	touch $@

check: setup  ## format, lint, types, shape and unit tests, before each commit; lists the slowest tests
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(PYTEST) tests/shape $(UNIT) -n $(JOBS) --dist loadscope --durations=5 $(ARGS)

ranks: setup  ## tests on several real processes, over gloo on this machine
	$(PYTEST) $(RANKS) $(ARGS)

ranks-alone: setup  ## the same, with fresh processes for each case: each night
	SHARED_RANKS=no $(SUITE) $(RANKS) $(ARGS)

SEEDS ?= 100
START ?= 0
WIDTHS ?= 1,2,3,4
PLANS ?=
loops: setup  ## draw SEEDS=1000 training programs, compare each with plain PyTorch (START=, WIDTHS=1,2, PLANS=shard,zero1); writes loops/
	PYTHONPATH=tests $(BIN)/python -m loops --seeds $(SEEDS) --start $(START) --widths "$(WIDTHS)" --plans "$(PLANS)" $(ARGS)

programs: setup  ## run programs of public repositories beside the real library: make programs FOLDER=clones [ARGS="--only gan"]
	@test -n "$(FOLDER)" || { echo "say where the clones lie: make programs FOLDER=clones"; exit 2; }
	PYTHONPATH=tests $(BIN)/python -m programs --folder "$(FOLDER)" $(ARGS)

hosts: setup  ## tests on several hosts of this machine (root; tests/hosts/install.sh), mpirun, SLURM, Ray, Kubernetes; says what is missing
	$(PYTEST) tests/hosts packages/paceline-hosts/tests/ranks/test_launch_kubernetes.py -rs $(ARGS)

# Clients of trackers, which are no dependencies: over 1 GB. MLflow's server runs on loopback, all others offline.
# Prometheus is tried where it is installed (apt-get install prometheus).
TRACKER_CLIENTS := aim==3.29.1 clearml==2.1.12 comet_ml==3.58.8 dvclive==3.49.1 mlflow==3.17.2 swanlab==0.10.3 trackio==0.43.0 \
	wandb==0.31.0
TRACKER_STAMP := .venv-trackers/.setup-done-$(SUM)-$(shell echo $(TRACKER_CLIENTS) | cksum | cut -d' ' -f1)

trackers: $(TRACKER_STAMP)  ## tests on the real clients of trackers, in an environment of their own
	.venv-trackers/bin/python -m pytest tests/trackers -rs $(ARGS)

$(TRACKER_STAMP):
	test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	# Their dependencies are others than ours: no constraints.
	.venv-trackers/bin/python -m pip install --quiet -e packages/paceline -e packages/paceline-lens tensorboard pexpect pytest pytest-timeout $(TRACKER_CLIENTS)
	rm -f .venv-trackers/.setup-done-*
	touch $@

# PYTHON's own torch fits the machine's driver, and needs no network, since nothing is installed. Without one, .venv has one.
gpu:  ## tests that need an accelerator, with the torch of PYTHON; says what is missing
	@python=$(PYTHON); $(PYTHON) dev/from_source.py -m pytest --version || { $(MAKE) --no-print-directory setup; python=$(BIN)/python; }; \
	$$python dev/from_source.py -m pytest tests/gpu -rs $(ARGS)

SIMULATED = PYTHONPATH=$(CURDIR)/tests/simulated_device/site SIMULATED_DEVICES=4
simulated-device: setup  ## the GPU tests and the parity of all plans on a simulated accelerator; needs a C++ compiler and ninja
	$(BIN)/python tests/simulated_device/site/simulated_device.py
	# Two runs: a process in which autograd has used a device cannot be forked, and the ranks of the second are forks.
	$(SIMULATED) $(PYTEST) tests/gpu -n 2 -rs $(ARGS)
	$(SIMULATED) $(PYTEST) packages/paceline/tests/ranks/test_parity.py -n 2 $(ARGS)
	# Eight devices for the combinations of axes. The device has no convolutions, which the model with batch norm has.
	$(SIMULATED) SIMULATED_DEVICES=8 $(PYTEST) packages/paceline-large/tests/ranks/test_parity_plans.py --deselect packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm $(ARGS)

docs: setup  ## build the documentation, strictly; open site/index.html, no server is needed
	$(BIN)/python -m mkdocs build --strict --quiet

COVERED ?= $(UNIT) $(RANKS) $(COMPAT)
coverage: setup  ## which lines and branches the tests reach, by package: make coverage [COVERED=packages/paceline/tests]
	$(BIN)/python -m coverage erase
	# Forked ranks and started commands are counted too; the figures of all processes are put together at the end.
	$(BIN)/python -m coverage run -m pytest $(COVERED) -m "not long" $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o .coverage.json
	$(BIN)/python dev/coverage_by_package.py .coverage.json

# In an environment and a copy of the repository of its own: it changes the source, line by line.
mutants: setup  ## change the code that decides numbers, one place at a time, and count what its tests do not notice
	test -x .venv-mutants/bin/python || $(PYTHON) -m venv .venv-mutants
	.venv-mutants/bin/python -m pip install --quiet cosmic-ray==8.7.0
	$(BIN)/python dev/mutants.py $(ARGS)

package: setup  ## build the wheel and the sdist into dist/, install them into an empty environment, run the quickstart there
	$(BIN)/python dev/package.py $(ARGS)

VERSION ?=
release: setup  ## make a release in dist/VERSION and a tag, and upload nothing: make release VERSION=0.2.0
	@test -n "$(VERSION)" || { echo "say which version: make release VERSION=0.2.0"; exit 2; }
	$(BIN)/python dev/release.py $(VERSION) $(ARGS)

# An environment of their own: the peers must not be where tests check that Paceline does without them.
bench:  ## measure against plain PyTorch and peers; writes benchmarks/reports/DATE.md
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	.venv-bench/bin/python -m pip install --quiet -r benchmarks/peers.txt $(PARTS) -c constraints.txt
	.venv-bench/bin/python benchmarks/run.py $(ARGS)

# The peer compiles its operators at its first start (minutes, a C++ compiler); a build that is killed leaves a `lock` in
# ~/.cache/torch_extensions, for which all later starts would wait.
bench-deepspeed: setup  ## measure scripts written for DeepSpeed against the real one, in an environment of its own
	test -x .venv-deepspeed/bin/python || $(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	.venv-deepspeed/bin/python -m pip install --quiet deepspeed==0.19.8 ninja
	$(BIN)/python benchmarks/bench_deepspeed.py $(ARGS)

sweep: setup  ## try every module, optimizer, scheduler and loader of torch's under every plan; writes docs/concepts/torch-*.md
	cd tests && ../$(BIN)/python -m torch_sweep.outcomes; status=$$?; cd .. && $(BIN)/python docs/list_torch_layers.py && exit $$status

chaos: setup  ## kill processes of one run 25 times at random; it must end with the weights of one left alone
	$(BIN)/python examples/survive/chaos.py $(ARGS)

clean:  ## remove what was built: .venv, site, caches
	rm -rf .venv .venv-bench .venv-deepspeed .venv-hf-* .venv-torch-* .venv-trackers .venv-mutants .venv-part-* .coverage* site build dist .pytest_cache .ruff_cache .mypy_cache
