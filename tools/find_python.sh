#!/bin/sh
# Print the first Python that really runs among the versions named, for example: find_python.sh 3.11 3.12
# A name on the PATH is not enough: pyenv leaves names there for versions that are switched off.
for version in "$@"; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version"*/bin/python; do
        if "$candidate" -c "import sys; sys.exit(not '%d.%d' % sys.version_info[:2] == '$version')" 2>/dev/null; then
            command -v "$candidate"
            exit 0
        fi
    done
done
exit 1
