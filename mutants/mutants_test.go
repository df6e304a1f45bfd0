package mutants_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/mutants"
	"mailproof/scenarios"
	"mailproof/verify"
)

// A patch that applies no more tests nothing; a header that is wrong tests
// something else.
func TestEveryMutantApplies(t *testing.T) {
	t.Parallel()
	all, err := mutants.All()
	require.NoError(t, err)
	require.NotEmpty(t, all)
	require.NoError(t, mutants.Check(".."))
}

// A defect whose scenario or invariant has been renamed would be an error of the
// harness after a minute, or survive for ever.
func TestEveryMutantNamesACellAndAnInvariant(t *testing.T) {
	t.Parallel()
	all, err := mutants.All()
	require.NoError(t, err)
	// Beside the checkers, what single scenarios judge by themselves.
	known := append(verify.Names(), "exact-tries", "no-hot-loop", "woken-sends-nothing", "dead-at-once", "outlives-leader", "ticket-latency",
		"cancel-ends-as-it-must", "told-is-true", "parked-and-alerted", "flood-flows", "urgent-first")
	for _, m := range all {
		chosen, err := scenarios.Select(scenarios.All(scenarios.Draw{}), []string{m.Scenario})
		require.NoError(t, err, m.Name)
		require.Len(t, chosen, 1, m.Name)
		require.Len(t, chosen[0].Cells, 1, "%s names a cell and not only a scenario", m.Name)
		require.True(t, slices.Contains(known, m.Invariant), "%s: no invariant is called %s", m.Name, m.Invariant)
		if m.Criterion != "" {
			decide, ok := scenarios.Alias(m.Criterion)
			require.True(t, ok, "%s: no criterion is called %s", m.Name, m.Criterion)
			require.Contains(t, decide, chosen[0].Name, "%s: %s is not decided by its scenario", m.Name, m.Criterion)
		}
	}
}
