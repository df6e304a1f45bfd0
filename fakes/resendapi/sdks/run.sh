#!/usr/bin/env bash
# Runs the shared list of calls against the fake with Resend's official SDKs
# for Go and Node, which are installed into a folder of their own and removed
# again. Needs Go, Node and npm.
set -euo pipefail
for tool in go node npm; do
  command -v "$tool" >/dev/null || { echo "missing: $tool (on Debian: apt-get install nodejs npm)" >&2; exit 3; }
done
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp "$here/node/package.json" "$here/node/calls.mjs" "$dir/"
(cd "$dir" && npm install --no-package-lock --no-audit --no-fund --loglevel=error)
(cd "$here/go" && go build -o "$dir/sdk-go" .)
cd "$here/.."
SDK_GO="$dir/sdk-go" SDK_NODE="$dir/calls.mjs" go test -count=1 -tags sdks -run 'TestSDK' "$@" .
