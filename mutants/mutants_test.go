package mutants_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/mutants"
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
