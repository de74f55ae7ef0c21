#!/bin/sh
# Makes the secrets of compose.yaml in docker/secrets, those that are not there yet, and prints the first user's API key.
# Needs openssl. Run it once, on the machine that runs compose.
set -eu
umask 077
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
cd "$folder"

random() { openssl rand -hex 32; }
hash_of() { printf %s "$1" | openssl dgst -sha256 | sed 's/.*[ =]//'; }
# Containers have users of their own, and see the file, not this folder: the folder keeps others of this machine out.
store() {
    printf '%s\n' "$2" >"$1.part"
    chmod 444 "$1.part"
    mv "$1.part" "$1"
}

[ -e state_password ] || store state_password "$(random)"
[ -e grafana_password ] || store grafana_password "$(random)"
[ -e flower_user ] || store flower_user "genpool:$(random)"
[ -e metrics_key ] || store metrics_key "gp-$(random)"
if [ ! -e api_keys ]; then
    key="gp-$(random)"
    # As `genpool keys new` prints them.
    store api_keys "first user sha256:$(hash_of "$key")
prometheus metrics sha256:$(hash_of "$(cat metrics_key)")"
    echo "API key, shown once: $key"
fi
