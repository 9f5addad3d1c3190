# make book    build the site from nothing          make serve   look at it in a browser
# make test    everything that is tested            make lint    linter and spelling alone
# make clean   remove what was generated

SHELL := /bin/bash
# The pins were made for 3.11; newer versions work as well.
PYTHON ?= $(shell sh tools/find_python.sh 3.11 3.12 3.13 3.14)

.PHONY: book serve lint test test-main test-colab test-newest screenshots picture pins clean python

book: python
	@$(PYTHON) tools/make_venv.py .venv requirements.txt
	@.venv/bin/python tools/build_book.py

serve: python
	@test -d _build/html || { echo "Nothing to serve yet: run 'make book' first."; exit 1; }
	@echo "Open http://localhost:8000 (Ctrl-C stops)"
	@cd _build/html && exec $(PYTHON) -m http.server --bind 127.0.0.1 8000

# What .ci/run calls: three levels of JAX, one summary line.
test: python
	@$(PYTHON) tools/run_tests.py main colab newest

test-main test-colab test-newest: python
	@$(PYTHON) tools/run_tests.py $(@:test-%=%)

lint: python
	@$(PYTHON) tools/make_venv.py .venv requirements.txt
	@.venv/bin/ruff check
	@.venv/bin/codespell

# Pictures of every page, light, dark and at phone width, in _build/screenshots.
screenshots: book
	@.venv/bin/python tools/screenshots.py

picture: python
	@$(PYTHON) tools/readme_picture.py

# After a change of a requirements*.in file.
pins: python
	@$(PYTHON) tools/make_venv.py .venv requirements.txt
	for name in requirements requirements-colab; do \
	    .venv/bin/python -m uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
	        --custom-compile-command "make pins" $$name.in --output-file $$name.txt; \
	done

clean:
	rm -rf _build .cache .venv .venv-colab .venv-newest build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found. Install one, or run: make book PYTHON=/path/to/python"; exit 1; }
