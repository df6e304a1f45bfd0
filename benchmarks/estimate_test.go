package benchmarks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestASizeFitsItsBounds: what a run is expected to take leaves room below its
// bounds for a machine that is slower by a tenth, and a quarter for each part.
func TestASizeFitsItsBounds(t *testing.T) {
	t.Parallel()
	for name, quick := range map[string]bool{"full": false, "quick": true} {
		s := sizeOf(quick)
		sum := partsStart
		for _, p := range parts() {
			sum += p.expect(s)
			require.LessOrEqual(t, p.expect(s)*5/4, s.partBound, "%s: %s", name, p.name)
		}
		require.LessOrEqual(t, sum*11/10, s.runBound, "%s takes %s: %s", name, sum, estimate(s, parts()))
		for _, v := range s.variants() {
			require.Positive(t, v.repeats, "%s: %s", name, v.name)
		}
	}
}

// TestEstimateCountsWhatWasChosen: more repeats take longer, and what is read
// from saved evidence takes nothing.
func TestEstimateCountsWhatWasChosen(t *testing.T) {
	t.Parallel()
	once, thrice := sizeOf(true), sizeOf(true)
	once.repeat(1)
	thrice.repeat(3)
	for _, p := range parts() {
		switch p.name {
		case "hops", "latency", "marketing":
			require.Greater(t, p.expect(thrice), p.expect(once), p.name)
		}
	}
	saved, err := choose([]string{"recovery"})
	require.NoError(t, err)
	require.Equal(t, "nothing is measured that takes time", estimate(once, saved))
	hops, err := choose([]string{"hops"})
	require.NoError(t, err)
	require.Regexp(t, `^about \d+s on two idle cores: 15s to start, hops \d+s; ended after 4m0s$`, estimate(once, hops))
}

// TestTheLastTicketIsWaitedFor: in a layout where tickets stand behind the whole
// flood, the bound covers a slow drain of it.
func TestTheLastTicketIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := sizeOf(false)
	behind := variant{flood: s.flood, behind: true}
	require.Greater(t, behind.bound(s), mails(s.flood, drainRate))
	require.Equal(t, s.ticketBound, variant{flood: s.flood}.bound(s))
	require.Less(t, behind.bound(s)+30*time.Second, s.partBound)
}
