package verify_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
)

// A sender that stood still past its lease goes on where it was: after another has
// heard "no such user", it may still offer the envelope. It may not do so as
// somebody who claimed the row again, nor as the one who heard the refusal, nor
// send its dot.
func TestWhoHeldTheRowBeforeARefusalForGood(t *testing.T) {
	t.Parallel()
	const older, heard = "notifyd-1.w1", "notifyd-2.w1"
	from := func(client string) func(*history.Attempt) {
		return func(a *history.Attempt) { a.Client = client }
	}
	takenOver := func(m *mail) {
		m.confirmed().claimed(older)
		m.w.process("notifyd-1", "paused")
		m.w.pass(simLease + 2*time.Second)
		m.claimed(heard).try(refuse("550 5.1.1 no such user")).dead()
		m.w.process("notifyd-1", "resumed")
	}
	for _, c := range []struct {
		name   string
		life   func(m *mail)
		breach bool
	}{
		{"the older holder, at the envelope", func(m *mail) {
			takenOver(m)
			m.try(refuse("550 5.1.1 no such user"), from(older))
		}, false},
		{"the older holder sends its dot", func(m *mail) {
			takenOver(m)
			m.try(refuseAfterDot("550 5.1.1 no such user"), from(older))
		}, true},
		{"the one that heard it", func(m *mail) {
			takenOver(m)
			m.try(refuse("550 5.1.1 no such user"), from(heard))
		}, true},
		{"claimed again", func(m *mail) {
			takenOver(m)
			m.claimed(older).try(refuse("550 5.1.1 no such user"))
		}, true},
		{"nobody held it before", func(m *mail) {
			m.confirmed().claimed(heard).try(refuse("550 5.1.1 no such user")).dead()
			m.try(refuse("550 5.1.1 no such user"), from(older))
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld("resend", "plain")
			c.life(w.mail("b1"))
			found := false
			for _, f := range w.rest().judge().Findings {
				found = found || f.Invariant == "retry-discipline"
			}
			require.Equal(t, c.breach, found)
		})
	}
}
