// Package provider chooses how the real parts are run.
package provider

import (
	"fmt"

	"mailproof/infra"
	"mailproof/infra/processes"
	"mailproof/internal/setup"
)

// Names of the providers that [Select] knows.
const (
	Auto      = "auto"
	Processes = "processes"
)

// Select returns a provider by name; "" is [Auto], which is the best one that
// this machine has: for now always [Processes].
func Select(name string) (infra.Provider, error) {
	switch name {
	case "", Auto, Processes:
		return processes.New(setup.Locate()), nil
	}
	return nil, fmt.Errorf("unknown provider %q: there are %q and %q", name, Auto, Processes)
}
