#!/usr/bin/env bash
# Installs Voxtune from this folder, without internet:   bash install.sh ENVIRONMENT [PYTHON]
#
# ENVIRONMENT is a new folder; PYTHON is the interpreter, of the version that the bundle was made for.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
environment=${1:-}
python=${2:-python3}

if [[ -z $environment ]]; then
    echo "usage: bash install.sh ENVIRONMENT [PYTHON]" >&2
    exit 2
fi
if [[ -e $environment ]]; then
    echo "install.sh: $environment already exists; choose a new folder" >&2
    exit 2
fi
needed=$(cat "$here/PYTHON")
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [[ $version != "$needed" ]]; then
    echo "install.sh: this bundle is for Python $needed, $python is $version; pass another interpreter" >&2
    exit 2
fi
if ! (cd "$here" && sha256sum --check --quiet SHA256SUMS); then
    echo "install.sh: the bundle is damaged or incomplete; copy it again" >&2
    exit 2
fi

options=()
if [[ -f $here/WITHOUT_TORCH ]]; then
    # PyTorch is that of the interpreter.
    if ! "$python" -c 'import torch' 2>/dev/null; then
        echo "install.sh: this bundle has no PyTorch, and $python has none; make it without TORCH=no" >&2
        exit 2
    fi
    options+=(--system-site-packages)
fi
"$python" -m venv "${options[@]}" "$environment"
extras=$(cat "$here/EXTRAS")
# --isolated: settings of this machine's pip that name an index do not count.
"$environment/bin/python" -m pip --isolated install --quiet --no-index --find-links "$here/wheels" "voxtune$extras"
if [[ -d $here/models ]]; then
    cp -R "$here/models" "$environment/models"
fi
"$environment/bin/voxtune" --version
echo "installed into $environment; next: $environment/bin/voxtune doctor"
