#!/usr/bin/env bash
# Set up a virtual environment from lock files, with the plugin in it. Quick when nothing is missing;
# an interrupted set-up is completed by the next run.
#
# usage: ci/setup.sh VENV LOCK...
#
# PYTHON       the Python to use; otherwise the first of python3.11, 3.12, 3.13 and python3 that is new enough
# TORCH_INDEX  where torch's CPU build comes from when pip is not configured to find it
# SETUP_GB     free disk space that is asked for before anything is installed
# SHARE        an environment whose packages are used by hard link where the lock files name the same versions
# PLUGIN       "editable" (default) installs the plugin from this folder, "none" leaves it out
set -euo pipefail

cd "$(dirname "$0")/.."
venv=$1
shift
locks=("$@")
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
needed_gb=${SETUP_GB:-5}
share=${SHARE:-}
plugin=${PLUGIN:-editable}
log=$venv/setup.log

say() { echo "setup: $*"; }
fail() {
    echo "setup: error: $*" >&2
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 or later"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python of version 3.11 or later on PATH; install one, or name it: make PYTHON=/path/to/python3.11"
}

check_disk() {
    local free_kb has_kb
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    has_kb=$(du -sk "$venv" | cut -f1) # what an earlier run has installed counts
    if ((free_kb + has_kb < needed_gb * 1024 * 1024)); then
        fail "$(pwd) has $((free_kb / 1024)) MiB free; about $needed_gb GB are needed for $venv"
    fi
}

# What a lock file amounts to here: a change of any of these makes the set-up look again.
stamp_of() { cat "$1" ci/setup.sh ci/unmet.py ci/share.py | sha256sum | cut -d' ' -f1; }
plugin_stamp() { (pwd && cat pyproject.toml nsa_plugin/__init__.py) | sha256sum | cut -d' ' -f1; }
is_done() { [[ -f $venv/.done/$1 && $(<"$venv/.done/$1") == "$2" ]]; }
mark_done() { mkdir -p "$venv/.done" && echo "$2" >"$venv/.done/$1"; }

# Read pip's output and show where it is.
show_progress() {
    local total=$1 n=0 line text
    while IFS= read -r line; do
        case $line in
        Collecting\ *)
            line=${line#Collecting }
            text="fetching $((++n)) of $total: ${line%% (from*}"
            ;;
        Installing\ collected*) text="writing files" ;;
        *) continue ;;
        esac
        if [[ -t 1 ]]; then
            printf '\r\033[Ksetup:   %s' "$text"
        elif ((n % 25 == 1)) || [[ $text == writing* ]]; then
            echo "setup:   $text"
        fi
    done
    if [[ -t 1 && -n ${text:-} ]]; then echo; fi
}

# Its whole output goes to the log.
pip_install() {
    local total=$1
    shift
    PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --no-deps --no-input --disable-pip-version-check \
        --progress-bar off "$@" 2>&1 | tee -a "$log" | show_progress "$total"
}

install_torch() {
    say "installing $1"
    pip_install 1 --force-reinstall "$1" && return
    say "pip is not configured to find $1; asking $torch_index"
    pip_install 1 --force-reinstall --index-url "$torch_index" "$1" ||
        fail "$1 is neither where pip looks nor at $torch_index (make variable TORCH_INDEX); see $log"
}

# What cannot be linked is left to pip.
share_packages() {
    "$venv/bin/python" -m ci.share "$share" "$1" >"$venv/shared.txt" 2>>"$log" || return 0
    sed 's/^/setup: /' "$venv/shared.txt"
}

install_lock() {
    local lock=$1 name unmet torch
    name=$(basename "$lock")
    is_done "$name" "$(stamp_of "$lock")" && return
    if [[ -n $share ]]; then share_packages "$lock"; fi
    unmet=$("$venv/bin/python" ci/unmet.py "$lock")
    if [[ -n $unmet ]]; then
        check_disk
        torch=$(grep '^torch==' <<<"$unmet" || true)
        if [[ -n $torch ]]; then install_torch "$torch"; fi
        unmet=$(grep -v '^torch==' <<<"$unmet" || true)
    fi
    if [[ -n $unmet ]]; then
        say "installing $(wc -l <<<"$unmet") packages of $lock"
        # What pip had set aside when it was interrupted.
        find "$venv/lib" -maxdepth 3 -path '*/site-packages/~*' -prune -exec rm -rf {} +
        echo "$unmet" >"$venv/unmet.txt"
        pip_install "$(wc -l <<<"$unmet")" --force-reinstall -r "$venv/unmet.txt" || {
            tail -n 5 "$log" >&2
            fail "pip could not install $lock; the whole output is in $log"
        }
    fi
    mark_done "$name" "$(stamp_of "$lock")"
}

install_plugin() {
    is_done plugin "$(plugin_stamp)" && return
    say "installing nsa-plugin from $(pwd)"
    pip_install 1 --no-build-isolation --editable . || {
        tail -n 5 "$log" >&2
        fail "pip could not install nsa-plugin; the whole output is in $log"
    }
    mark_done plugin "$(plugin_stamp)"
}

mkdir -p "$venv"
exec 9>"$venv/.lock"
flock --nonblock 9 || {
    say "waiting for another set-up of $venv"
    flock 9
}
if ! new_enough "$venv/bin/python" || [[ ! -f $venv/.done/venv ]]; then
    python=$(find_python)
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail "$python cannot make a virtual environment; is its venv module installed?"
    exec 9>"$venv/.lock"
    mark_done venv 1
fi
for lock in "${locks[@]}"; do install_lock "$lock"; done
if [[ $plugin == editable ]]; then install_plugin; fi
say "$venv is ready"
