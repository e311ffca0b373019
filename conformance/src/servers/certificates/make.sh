#!/usr/bin/env bash
# Makes the certificates of the tests anew: an authority that nobody trusts, and of it one
# certificate for this machine and one for another host. They open nothing: they are for servers that
# tests start on the loopback address.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
key authority.key
openssl req -x509 -new -key authority.key -sha256 -days 36500 -subj "/CN=test authority" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign -out authority.pem
for name in here elsewhere; do
    names=IP:127.0.0.1,DNS:localhost
    [ "$name" = here ] || names=DNS:elsewhere.example
    key "$name.key"
    openssl req -new -key "$name.key" -subj "/CN=$name" |
        openssl x509 -req -CA authority.pem -CAkey authority.key -CAcreateserial -sha256 -days 36500 \
            -extfile <(printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\n' "$names") -out "$name.pem"
done
rm -f authority.key authority.srl
