#!/bin/sh
# The command `pegaflow` of a bundle: bin/ beside python/, wherever the bundle lies.
package=$(dirname "$(readlink -f "$0")")/../python
# The native module fits one Python version; its name says which.
version=$(find "$package/pegaflow" -name '_native.cpython-*' |
    sed 's/.*_native\.cpython-\(3\)\([0-9]*\)-.*/\1.\2/')
python=$(command -v "python$version" || command -v python3) || {
    echo "pegaflow: there is no Python here; the package was built for Python $version" >&2
    exit 1
}
PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pegaflow "$@"
