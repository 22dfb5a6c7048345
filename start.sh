#!/usr/bin/env bash
# Sets up what is missing, then serves; `./start.sh --help` lists the options. PYTHON names another interpreter.
exec "${PYTHON:-python3}" "$(dirname "$0")/start.py" "$@"
