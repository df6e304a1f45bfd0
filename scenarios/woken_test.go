package scenarios

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

func TestDotsAreHeldToTheLeaseOfTheirClaim(t *testing.T) {
	t.Parallel()
	const s = int64(time.Second)
	wall := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	stamp := func(t int64) string { return wall.Add(time.Duration(t)).Format("2006-01-02 15:04:05.999999-07") }
	claim := func(at, until int64, token string) history.Change {
		return history.Change{Table: "public.notifications", Op: "UPDATE", At: at, Old: map[string]string{"token": "0"}, New: map[string]string{
			"dedupe_key": "k", "status": "SENDING", "token": token, "locked_until": stamp(until),
		}}
	}
	judge := func(changes []history.Change, attempts ...history.Attempt) ownFindings {
		var own ownFindings
		judgeDots(&history.History{Meta: &history.Meta{Wall: wall}, Changes: changes, Attempts: attempts}, &own)
		return own
	}
	one := []history.Change{claim(1*s, 3*s, "1")}
	require.Empty(t, judge(one, history.Attempt{Key: "k", From: 1 * s, DotAt: 2 * s}).Findings)
	require.Empty(t, judge(one, history.Attempt{Key: "k", From: 1 * s, DotAt: 0}).Findings, "no dot, no harm")
	late := judge(one, history.Attempt{Key: "k", From: 1 * s, DotAt: 5 * s})
	require.Len(t, late.Findings, 1)
	require.Equal(t, verify.Fail, late.Findings[0].Verdict)
	require.Equal(t, "k", late.Findings[0].Key)
	require.Contains(t, late.Findings[0].Text, "2s after its lease")
	require.Equal(t, 1, late.checked[0].Looked)
	require.Equal(t, 1, late.checked[0].Findings)

	two := []history.Change{claim(1*s, 3*s, "1"), claim(4*s, 6*s, "2")}
	require.Empty(t, judge(two, history.Attempt{Key: "k", From: 4 * s, DotAt: 5 * s}).Findings, "the later claim's lease counts for its attempt")
	require.Len(t, judge(two, history.Attempt{Key: "k", From: 1 * s, DotAt: 5 * s}).Findings, 1, "the lease of another is no excuse")
	require.Equal(t, verify.Invalid, judge(nil, history.Attempt{Key: "k", From: 1, DotAt: 2}).Findings[0].Verdict)
}
