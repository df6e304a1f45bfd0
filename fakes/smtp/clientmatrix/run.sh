#!/usr/bin/env bash
# Runs every real client against every fault and writes the table into docs/.
# It says what is missing and stops; it installs only nodemailer, into a folder
# that it removes. Postfix is run from a configuration of its own (as root); see
# the package comment.
set -euo pipefail
cd "$(dirname "$0")/../../.."

missing=()
for tool in python3 node npm swaks smtp-source postfix; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if ((${#missing[@]})); then
  echo "missing: ${missing[*]}" >&2
  echo "on Debian: apt-get install swaks postfix nodejs npm python3" >&2
  echo "(keep postfix from starting by a policy-rc.d that exits 101; it needs no configuration)" >&2
  exit 3
fi
node_dir=$(mktemp -d)
trap 'rm -rf "$node_dir"' EXIT
(cd "$node_dir" && echo '{}' >package.json && npm install --no-audit --no-fund --silent "nodemailer@${NODEMAILER_VERSION:-10.6.1}")
go run ./fakes/smtp/clientmatrix -nodemailer "$node_dir" -out docs/fakes-smtp-clients.md "$@"
echo "wrote docs/fakes-smtp-clients.md"
