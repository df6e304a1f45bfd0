#!/usr/bin/env bash
# Runs the shared list of calls against the fake with Resend's official SDKs
# for Go and Node, which are installed into a folder of their own and removed
# again. Needs Go, Node and npm.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp "$here/node/package.json" "$here/node/calls.mjs" "$dir/"
(cd "$dir" && npm install --no-package-lock --no-audit --no-fund --loglevel=error)
(cd "$here/go" && go build -o "$dir/sdk-go" .)
cd "$here/.."
SDK_GO="$dir/sdk-go" SDK_NODE="$dir/calls.mjs" go test -count=1 -tags sdks -run 'TestSDK' "$@" .
