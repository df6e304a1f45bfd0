#!/usr/bin/env bash
# make lint: everything a machine can see of the repository. Prints each breach
# and exits 1 if there was one.
set -uo pipefail
cd "$(dirname "$0")/.."
GO=${GO:-go}
failed=0

step() { # name, command...
  local name=$1 out status=0
  shift
  out=$("$@" 2>&1) || status=$?
  # On a machine that lints for the first time Go says what it fetches.
  out=$(grep -v '^go: downloading ' <<<"$out")
  if ((status == 0)) && [ -z "$out" ]; then
    printf 'lint  %-12s ok\n' "$name"
    return
  fi
  printf 'lint  %-12s FAILED\n%s\n' "$name" "$out"
  failed=1
}

unformatted() { git ls-files '*.go' | xargs "$GO" tool gofumpt -l; }
# go.mod must name exactly what is imported, pinned.
untidy() { "$GO" mod tidy -diff; }
# No password, no name of a package registry, no path of one machine (M6-14,
# TRAP-M6-12). Words that such a line would have to contain:
forbidden() {
  git grep -nIE 'proxy\.golang\.org|repo1?\.maven|registry\.npmjs|pypi\.org|deb\.debian\.org|/home/[a-z]|/root/' -- . ':!scripts/lint.sh' ':!go.sum'
  git grep -nIE '(password|passwd|secret)[[:space:]]*[:=]+[[:space:]]*"[^"$<{%]{6,}"' -- '*.go' '*.yml' '*.yaml' '*.json' ':!*_test.go'
  return 0
}
shell_syntax() { local f; for f in scripts/*.sh .ci/run; do bash -n "$f"; done; }

step gofumpt unformatted
step vet "$GO" vet ./...
step staticcheck "$GO" tool staticcheck ./...
step go.mod untidy
step shell shell_syntax
step contents forbidden
if [ -d mutants ]; then step mutants "$GO" run ./cmd/mailproof mutants --check; fi
exit $failed
