#!/bin/sh
# The command `pegaflow` of a bundle: bin/ beside python/, in any place.
package=$(dirname "$(readlink -f "$0")")/../python
# The native module fits one Python version, which is part of its name.
version=$(find "$package/pegaflow" -name '_native.cpython-*' |
    sed 's/.*_native\.cpython-\(3\)\([0-9]*\)-.*/\1.\2/')
python=$(command -v "python$version" || command -v python3) || {
    echo "pegaflow: Python is missing; the package was built for Python $version" >&2
    exit 1
}
PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pegaflow "$@"
