// Package provider chooses how the real parts are run.
package provider

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"mailproof/infra"
	"mailproof/infra/containers"
	"mailproof/infra/processes"
	"mailproof/internal/setup"
)

// Names of the providers that [Select] knows.
const (
	Auto       = "auto"
	Processes  = "processes"
	Containers = "containers"
)

// Variable of the environment that says what [Auto] is, for the tests of every
// package: MAILPROOF_PROVIDER=containers make test.
const Variable = "MAILPROOF_PROVIDER"

// askTimeout bounds the question whether a container engine answers.
const askTimeout = 5 * time.Second

// Select returns a provider by name, of the servers that this machine has. [Auto]
// (or "") is what [Variable] says; else plain processes, and containers only
// where the servers are missing and a container engine answers.
func Select(name string) (infra.Provider, error) { return SelectAt(name, setup.Locate()) }

// SelectAt is Select for servers at paths.
func SelectAt(name string, paths setup.Paths) (infra.Provider, error) {
	if name == "" || name == Auto {
		name = cmp.Or(os.Getenv(Variable), Auto)
	}
	switch name {
	case Processes:
		return processes.New(paths), nil
	case Containers:
		if err := engineAnswers(); err != nil {
			return nil, fmt.Errorf("containers: no container engine answers (is DOCKER_HOST right?): %w", err)
		}
		return containers.New(containers.DefaultImages()), nil
	case Auto:
		if (paths.PostgresBin == "" || paths.RabbitMQBin == "") && engineAnswers() == nil {
			return containers.New(containers.DefaultImages()), nil
		}
		return processes.New(paths), nil
	}
	return nil, Known(name)
}

// Known refuses a name that [Select] does not know; "" stands for [Auto]. It asks
// nobody whether the provider works here.
func Known(name string) error {
	switch name {
	case "", Auto, Processes, Containers:
		return nil
	}
	return fmt.Errorf("unknown provider %q: there are %q, %q and %q", name, Auto, Processes, Containers)
}

func engineAnswers() error {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	return containers.Available(ctx)
}
