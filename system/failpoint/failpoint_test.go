//go:build !failpoint

package failpoint

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReleaseBuildRefusesArmedPoints(t *testing.T) {
	t.Setenv(EnvVar, "")
	require.NoError(t, Check())
	t.Setenv(EnvVar, "worker.after-claim=kill")
	require.ErrorIs(t, Check(), ErrRelease)
}
