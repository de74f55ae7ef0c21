#!/bin/sh
# Writes docker/requirements/*.txt: every Python package of the images, with its hash. Run by `make docker-lock`.
# usage: lock.sh PATH-OF-UV [UV-OPTION...], in the project's root
set -eu
uv=$1
shift
lock() {
    target=docker/requirements/$1.txt
    shift
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command 'make docker-lock' --output-file "$target" "$@"
}
lock api "$@" pyproject.toml
lock flower "$@" pyproject.toml --extra flower --constraint docker/requirements/api.txt
lock build "$@" docker/requirements/build.in
# llama.cpp comes as source: it is compiled in a stage of its own, and what it needs beside itself is installed with the rest.
lock worker "$@" pyproject.toml --extra llama --constraint docker/requirements/api.txt \
    --no-emit-package llama-cpp-python
lock llama "$@" docker/requirements/llama.in --no-deps
