# mailproof: the two commands are "make chaos" and "make test".
#
# Both first look at what this machine has. What is missing they name, with the
# size, and ask before they install it; YES=1 or CI=true answer yes.

SHELL := /bin/bash
.DEFAULT_GOAL := help

GO    ?= go
BIN   := bin
# The race detector needs a C compiler; a machine with only Go runs without it,
# and the first line of "make test" says so.
RACE  := $(shell command -v $${CC:-gcc} >/dev/null 2>&1 && echo -race)
PKGS  ?= ./...
# Packages that start brokers share the machine's cores: two at a time.
TESTFLAGS ?= -p 2 -timeout 20m

CHAOS_ARGS := $(foreach s,$(SCENARIO),--scenario $(s)) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: help deps build test lint fmt chaos gate bench bench-quick mutants crash-table plans growth clients sdks clean

help: ## show this text
	@echo "mailproof: proves from evidence that no mail is lost and none is delivered twice"
	@echo
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make chaos SCENARIO=t6.7 SEED=42      one scenario, the same run again"
	@echo "  make chaos ARGS=--list                what there is"
	@echo "  YES=1 make chaos                      install what is missing without asking"

deps: build ## look for Postgres, RabbitMQ, Java and Kafka's jars; offer to install what is missing
	@$(BIN)/mailproof setup

build: ## build the binaries into bin/
	$(GO) build -o $(BIN)/ ./cmd/... ./system/cmd/...

# What only prints asks for nothing to be installed.
chaos: build ## run the failure scenarios; the report is runs/latest/index.html
	@$(if $(filter --list --help -h,$(ARGS)),true,$(BIN)/mailproof setup)
	@$(BIN)/mailproof chaos $(CHAOS_ARGS)

test: build ## run unit and integration tests on the real parts
	@$(BIN)/mailproof setup
	@$(if $(RACE),,echo "no C compiler here: the tests run without the race detector";) true
	$(GO) tool gotestsum --format pkgname -- $(RACE) $(TESTFLAGS) $(PKGS)

gate: build ## decide on the acceptance criteria AC1 to AC8, one line each
	@$(BIN)/mailproof setup
	@$(BIN)/mailproof gate $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: ## gofumpt, go vet, staticcheck, and what the repository must not hold
	@GO="$(GO)" bash scripts/lint.sh

fmt: ## format the code
	$(GO) tool gofumpt -l -w $$(git ls-files '*.go')

mutants: build ## plant each known defect and see the scenario that must catch it turn red
	@$(BIN)/mailproof setup
	@$(BIN)/mailproof mutants $(ARGS)

plans: ## run each SQL statement against 1,000,000 rows (ROWS=n); writes docs/statement-plans.md
	@mkdir -p runs && rm -f runs/plans.jsonl
	PLANS_ROWS=$(or $(ROWS),1000000) PLANS_OUT=$(CURDIR)/runs/plans.jsonl $(GO) test -count=1 -p 1 -timeout 30m \
		-run TestNoStatementScansTheTable ./system/delivery ./system/outbox ./system/booking
	$(GO) run ./system/plantest/plantable runs/plans.jsonl > docs/statement-plans.md

growth: ## dead rows and sizes under a steady load, 8 minutes (ARGS="-rate 200 -for 8m")
	$(GO) run ./system/delivery/growthbench $(or $(ARGS),-rate 200 -for 8m -every 30s)

bench: build ## measure the system beside its raw floors; writes docs/benchmarks/m06-notification.md
	@$(BIN)/mailproof setup
	@$(BIN)/mailproof bench $(if $(SEED),--seed $(SEED)) $(ARGS)

bench-quick: build ## the same document in a few minutes, at runs/bench/m06-notification.md
	@$(BIN)/mailproof setup
	@$(BIN)/mailproof bench --quick --out runs/bench/m06-notification.md $(if $(SEED),--seed $(SEED)) $(ARGS)

crash-table: build ## kill and stop the system at every boundary; writes docs/crash-table.md
	@$(BIN)/mailproof setup
	@$(BIN)/mailproof crash-table --write docs/crash-table.md $(if $(SEED),--seed $(SEED)) $(ARGS)

clients: ## run nine real mail clients against every SMTP fault; writes docs/fakes-smtp-clients.md
	@bash fakes/smtp/clientmatrix/run.sh $(ARGS)

sdks: ## run Resend's own Go and Node SDKs against the fake of its API
	@bash fakes/resendapi/sdks/run.sh

clean: ## remove what the commands above made here (runs/ and bin/)
	rm -rf $(BIN) runs
