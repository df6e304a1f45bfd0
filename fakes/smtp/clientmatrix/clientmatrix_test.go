package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestGoClients holds what docs/fakes-smtp-clients.md says of the clients that
// need nothing installed. The others are run by run.sh.
func TestGoClients(t *testing.T) {
	t.Parallel()
	deliveredButFailed := []string{ // the caller is told that it failed, and the recipient has it
		"stored, closed without the 250", "stored, garbage for the 250", "stored, 451 (lie)",
		"stored, 250, then closed", "stored, 250, closed at QUIT", "stored, 250, garbage to QUIT",
	}
	for _, c := range []client{netSMTP{}, goSMTP{}, goMail{}} {
		for i, f := range faults {
			if f.name == "stored, no 250 until the client gives up" {
				continue // six seconds each; run.sh has them
			}
			t.Run(c.name()+"/"+f.name, func(t *testing.T) {
				t.Parallel()
				got, err := one(context.Background(), c, f, i)
				require.NoError(t, err)
				require.True(t, got.fired)
				require.Equal(t, 1, got.tries, "none of them sends again by itself")
				switch {
				case f.none:
					require.Equal(t, cell{said: said{ok: true}, copies: 1, tries: 1, fired: true, struckStored: true}, got)
				case f.name == "not stored, 250 (lie)":
					require.True(t, got.said.ok && got.copies == 0)
				default:
					require.False(t, got.said.ok)
					require.Equal(t, f.stored() == "yes", got.copies == 1)
				}
				if contains(deliveredButFailed, f.name) {
					require.True(t, got.wrong())
				}
			})
		}
	}
}
