# Two commands on a bare machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Extra pip arguments for torch, for example --index-url=URL of PyTorch's CPU wheels; on Linux, pip's default is the
# CUDA build (several GB), which also works.
TORCH_PIP ?=
DEMO ?= runs/letters_dit
STEPS ?= 400
# Share of letters that must be read correctly.
MINIMUM ?= 0.9
DEMO_TEXT ?= runs/letters_text
DEMO_EDIT ?= runs/letters_edit
DEMO_VIDEO ?= runs/moving_letters_dit
DEMO_LATENT ?= runs/pictograms_latent
DEMO_AUTOENCODER ?= runs/pictogram_autoencoder
DEMO_CASCADE ?= runs/cascade_letters
DEMO_PICTOGRAMS ?= runs/cascade_pictograms
DEMO_AVATARS ?= runs/avatars_text
DEMO_AVATAR_AUTOENCODER ?= runs/avatar_autoencoder
DEMO_AVATARS_LATENT ?= runs/avatars_latent
DEMO_FLUX2 ?= runs/tiny_flux2
# 400 colour pictograms, evenly spread over these blocks of Unicode.
PICTOGRAMS = pictograms --size 64 --blocks pictographs transport supplemental extended --count 400

export OMP_NUM_THREADS ?= 1
# Empty: the many processes of the tests share compiled modules.
export PYTHONDONTWRITEBYTECODE =
export TQDM_DISABLE ?= 1

.PHONY: demo demo-text demo-edit demo-video demo-latent demo-cascade demo-pictograms demo-avatars demo-avatars-latent demo-pipeline docs test lint test-parallel test-long test-faults test-slurm benchmark hashes clean help

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

# All but torch and the libraries of its CUDA build: which build it is, and from where, is yours to choose.
$(VENV)/.installed: pyproject.toml constraints.txt hashes.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --require-hashes --only-binary :all: --no-deps -r hashes.txt
	$(INSTALL) -c constraints.txt $(TORCH_PIP) torch
	$(INSTALL) --no-deps --no-build-isolation -e .
	touch $@

NOT_HASHED = torch $(addprefix cuda-,bindings pathfinder toolkit) $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
  cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

COMPILE = UV_CUSTOM_COMPILE_COMMAND='make hashes' uv pip compile --quiet --universal --generate-hashes --no-annotate \
  --python-version 3.11 $(addprefix --no-emit-package ,$(NOT_HASHED))

hashes: ## write hashes.txt and hashes-docs.txt again, after a change of constraints.txt or pyproject.toml (needs uv)
	$(COMPILE) --extra dev --extra encoders -c constraints.txt --output-file hashes.txt pyproject.toml
	$(COMPILE) --extra docs -c hashes.txt --output-file hashes-docs.txt pyproject.toml \
	  $$(sed -n '/; sys_platform/d; s/==.*//p' hashes.txt | sed 's/^/--no-emit-package /')

data/letters/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare letters --out data/letters

demo: $(VENV)/.installed data/letters/dataset.json ## train letters on two ranks, draw samples.png, read them
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory letters_dit \
	  training.run_dir=$(DEMO) training.num_steps=$(STEPS)
	$(VENV)/bin/python -m launch.sample --checkpoint $(DEMO) --out samples.png
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO) --metric letters --minimum $(MINIMUM)

data/letters_text/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare letters --text-encoder all-minilm-l6-v2 --out data/letters_text

demo-text: $(VENV)/.installed data/letters_text/dataset.json ## train letters by description, draw text.png, read them
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory letters_text \
	  training.run_dir=$(DEMO_TEXT)
	$(VENV)/bin/python -m launch.sample --checkpoint $(DEMO_TEXT) --count 8 --out text.png \
	  --prompt "the letter Q in a bold serif font" "the letter Q in a light sans font"
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_TEXT) --metric letters --minimum 0.85 --minimum-style 0.85

data/letter_pairs/faces.jsonl: | $(VENV)/.installed
	$(VENV)/bin/python -m examples.letters.edits --out data/letter_pairs

data/letters_edit/dataset.json: | data/letter_pairs/faces.jsonl
	$(VENV)/bin/python -m energon_data.prepare images --in data/letter_pairs/train/edited \
	  --reference data/letter_pairs/train/originals --validation 0 --text-encoder all-minilm-l6-v2 --out data/letters_edit

demo-edit: $(VENV)/.installed data/letters/dataset.json data/letters_edit/dataset.json ## train edits of letters by instruction, draw edit.png, compare held-out fonts
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory letters_edit \
	  training.run_dir=$(DEMO_EDIT)
	$(VENV)/bin/python -m launch.sample --checkpoint $(DEMO_EDIT) --out edit.png \
	  --reference data/letter_pairs/faces/STIXGeneral/Q.png --prompt "make it bold" "make it italic" "make it light"
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_EDIT) --metric letter_edits --out edits.png \
	  --minimum 0.9 --minimum-style 0.8

data/moving_letters/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare moving_letters --text-encoder all-minilm-l6-v2 --out data/moving_letters

demo-video: $(VENV)/.installed data/moving_letters/dataset.json ## train letters that move, draw moving.gif, read them
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory moving_letters_dit \
	  training.run_dir=$(DEMO_VIDEO)
	$(VENV)/bin/python -m launch.sample --checkpoint $(DEMO_VIDEO) --out moving.gif
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_VIDEO) --metric letters --minimum 0.8 --minimum-motion 0.8

data/pictograms/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare $(PICTOGRAMS) --out data/pictograms

runs/pictogram_vae/config.json: | data/pictograms/dataset.json
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory pictogram_autoencoder \
	  training.run_dir=$(DEMO_AUTOENCODER)
	$(VENV)/bin/python -m launch.export --checkpoint $(DEMO_AUTOENCODER) --format diffusers --out runs/pictogram_vae

data/pictograms_latent/dataset.json: | runs/pictogram_vae/config.json
	$(VENV)/bin/python -m energon_data.prepare $(PICTOGRAMS) --vae runs/pictogram_vae --text-encoder all-minilm-l6-v2 \
	  --out data/pictograms_latent

demo-latent: $(VENV)/.installed data/pictograms_latent/dataset.json ## train an autoencoder and, on its latents, pictograms by name
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory pictograms_latent \
	  training.run_dir=$(DEMO_LATENT)
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_LATENT) --metric pictograms --out pictograms.png --minimum 0.6

data/letters_%/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare letters --size $* --out data/letters_$*

demo-cascade: $(VENV)/.installed data/letters/dataset.json data/letters_32/dataset.json data/letters_64/dataset.json ## train Imagen's UNets on letters of 16, 32 and 64 pixels, read what each draws
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory cascade_letters_16 \
	  training.run_dir=$(DEMO_CASCADE)_16
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory cascade_letters_32 \
	  training.run_dir=$(DEMO_CASCADE)_32
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory cascade_letters_64 \
	  training.run_dir=$(DEMO_CASCADE)_64
	$(VENV)/bin/python -m launch.evaluate --metric letters --out cascade.png --minimum 0.9 \
	  --cascade base=$(DEMO_CASCADE)_16 sr32=$(DEMO_CASCADE)_32 sr64=$(DEMO_CASCADE)_64
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_CASCADE)_32 --metric sharpness --minimum 1
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_CASCADE)_64 --metric sharpness --minimum 0.5

data/pictograms_64/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare $(PICTOGRAMS) --text-encoder all-minilm-l6-v2 --out data/pictograms_64

data/all_pictograms_64/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare pictograms --size 64 --text-encoder all-minilm-l6-v2 --validation 0.05 \
	  --out data/all_pictograms_64

demo-pictograms: $(VENV)/.installed data/pictograms_64/dataset.json data/all_pictograms_64/dataset.json ## the same cascade for colour pictograms by name
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory cascade_pictograms_16 \
	  training.run_dir=$(DEMO_PICTOGRAMS)_16
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory cascade_pictograms_32 \
	  training.run_dir=$(DEMO_PICTOGRAMS)_32
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory cascade_pictograms_64 \
	  training.run_dir=$(DEMO_PICTOGRAMS)_64
	$(VENV)/bin/python -m launch.evaluate --metric pictograms --out cascade_pictograms.png --minimum 0.9 \
	  --data data/pictograms_64 --features efficientnet_lite0 \
	  --cascade base=$(DEMO_PICTOGRAMS)_16 sr32=$(DEMO_PICTOGRAMS)_32 sr64=$(DEMO_PICTOGRAMS)_64
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_PICTOGRAMS)_32 --metric sharpness --minimum 0.5
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_PICTOGRAMS)_64 --metric sharpness --minimum 0

runs/tiny_flux2_base/model_index.json: | $(VENV)/.installed
	$(VENV)/bin/python -m examples.flux2.tiny --out runs/tiny_flux2_base

data/pictograms_flux2/dataset.json: | runs/tiny_flux2_base/model_index.json
	$(VENV)/bin/python -m energon_data.prepare pictograms --size 64 --count 100 --validation 0 \
	  --vae runs/tiny_flux2_base --text-encoder runs/tiny_flux2_base --out data/pictograms_flux2

$(DEMO_FLUX2)_pipeline/model_index.json: | data/pictograms_flux2/dataset.json
	$(VENV)/bin/python -m launch.train --yes --factory finetune checkpoint.start_from=runs/tiny_flux2_base \
	  data.path=data/pictograms_flux2 optimizer.lr=2e-3 training.num_steps=300 training.run_dir=$(DEMO_FLUX2)
	$(VENV)/bin/python -m launch.export --checkpoint $(DEMO_FLUX2) --format pipeline --out $(DEMO_FLUX2)_pipeline

demo-pipeline: $(VENV)/.installed $(DEMO_FLUX2)_pipeline/model_index.json ## train a small FLUX.2 of diffusers, export it as a pipeline, compare the pictures
	$(VENV)/bin/python -m examples.flux2.compare --checkpoint $(DEMO_FLUX2) --pipeline $(DEMO_FLUX2)_pipeline \
	  --prompt "red heart" "blue heart" --out runs/tiny_flux2.png

data/avatars/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare avatars --text-encoder all-minilm-l6-v2 --out data/avatars

demo-avatars: $(VENV)/.installed data/avatars/dataset.json ## train avatars by text, draw and read combinations that training never saw
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory avatars_text \
	  training.run_dir=$(DEMO_AVATARS)
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_AVATARS) --metric avatars --out avatars.png --minimum 0.9

data/avatars_64/dataset.json: | $(VENV)/.installed
	$(VENV)/bin/python -m energon_data.prepare avatars --size 64 --out data/avatars_64

runs/avatar_vae/config.json: | data/avatars_64/dataset.json
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory avatar_autoencoder \
	  training.run_dir=$(DEMO_AVATAR_AUTOENCODER)
	$(VENV)/bin/python -m launch.export --checkpoint $(DEMO_AVATAR_AUTOENCODER) --format diffusers --out runs/avatar_vae

data/avatars_latent/dataset.json: | runs/avatar_vae/config.json
	$(VENV)/bin/python -m energon_data.prepare avatars --size 64 --vae runs/avatar_vae --text-encoder all-minilm-l6-v2 \
	  --out data/avatars_latent

demo-avatars-latent: $(VENV)/.installed data/avatars_latent/dataset.json ## the same in 64 pixels, on latents of an autoencoder that is trained first
	$(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m launch.train --yes --factory avatars_latent \
	  training.run_dir=$(DEMO_AVATARS_LATENT)
	$(VENV)/bin/python -m launch.evaluate --checkpoint $(DEMO_AVATARS_LATENT) --metric avatars --out avatars_64.png --minimum 0.9

# Files in their order: what starts many processes comes first, so that the workers end together. Lint runs meanwhile,
# and its output comes last.
test: $(VENV)/.installed ## lint, types and the quick tests that need no GPU
	@log=$$(mktemp); trap 'rm -f $$log' EXIT; trap 'exit 130' INT TERM; \
	{ $(LINT); } > $$log 2>&1 & lint=$$!; \
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$lint; lint=$$?; cat $$log; exit $$((tests | lint))

# A variable, because `make -n test` would run a line with a recursive make.
LINT = $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

lint: $(VENV)/.installed ## ruff and mypy
	$(LINT)

test-parallel: $(VENV)/.installed ## the long tests: full runs, every layout, up to eight ranks
	$(VENV)/bin/python -m pytest tests/integration tests/parallel tests/laws tests/unit -m "slow and not long" -n 2 --dist loadfile --no-loadscope-reorder

test-faults: $(VENV)/.installed ## the long tests of faults: kills, damage, restarts, bad numbers, hangs
	$(VENV)/bin/python -m pytest tests/faults -m slow -n 2 --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/.installed ## further cases: plans of all recipes, small pipelines and compiled layers of all families, all kernels in the interpreter
	$(VENV)/bin/python -m pytest -m long -n 2 --dist loadfile

test-slurm: $(VENV)/.installed ## launch/train.sh and nemo-run on a Slurm of this machine (root; apt-get install slurm-wlm munge)
	$(VENV)/bin/python -m pytest tests/slurm -m slow

benchmark: $(VENV)/.installed ## step time of the tiny recipe on this machine
	$(VENV)/bin/python -m benchmarks.step --factory tiny_dit

docs: $(VENV)/.installed ## the documentation as a site in site/; every link is checked
	$(INSTALL) --require-hashes --only-binary :all: --no-deps -r hashes-docs.txt
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# Folders of the demos only: data/ and runs/ also have your own.
DEMO_DATA = $(addprefix data/,letters letters_32 letters_64 letters_text letter_pairs letters_edit moving_letters pictograms \
  pictograms_64 all_pictograms_64 pictograms_latent pictograms_flux2 avatars avatars_64 avatars_latent)
DEMO_RUNS = $(DEMO) $(DEMO_TEXT) $(DEMO_EDIT) $(DEMO_VIDEO) $(DEMO_AUTOENCODER) runs/pictogram_vae $(DEMO_LATENT) \
  $(foreach size,16 32 64,$(DEMO_CASCADE)_$(size) $(DEMO_PICTOGRAMS)_$(size)) $(DEMO_AVATARS) $(DEMO_AVATAR_AUTOENCODER) \
  runs/avatar_vae $(DEMO_AVATARS_LATENT) runs/tiny_flux2_base $(DEMO_FLUX2) $(DEMO_FLUX2)_pipeline runs/tiny_flux2.png

clean: ## remove data, runs and pictures of the demos, the site and caches
	rm -rf $(DEMO_DATA) $(DEMO_RUNS) site .mypy_cache .pytest_cache .ruff_cache samples.png text.png edit.png edits.png \
	  moving.gif pictograms.png avatars.png avatars_64.png cascade.png cascade_pictograms.png
