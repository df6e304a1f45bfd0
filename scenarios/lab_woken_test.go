package scenarios

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/verify"
)

func TestWokenWorkersLeaveOneCopyEach(t *testing.T) {
	t.Parallel()
	fault := history.Fault{Name: faultWoken}
	var attempts []history.Attempt
	for i := range wakenings {
		key := fmt.Sprintf("k%d", i)
		fault.Keys = append(fault.Keys, key)
		attempts = append(attempts,
			history.Attempt{ID: int64(2*i + 1), Key: key}, // woken, closed without the dot
			history.Attempt{ID: int64(2*i + 2), Key: key, Stored: true, DotAt: 1})
	}
	judge := func(f history.Fault, attempts ...history.Attempt) ownFindings {
		var own ownFindings
		judgeWoken(&history.History{Faults: []history.Fault{f}, Attempts: attempts}, &own)
		return own
	}
	good := judge(fault, attempts...)
	require.Empty(t, good.Findings)
	require.Equal(t, wakenings, good.checked[0].Looked)

	doubled := judge(fault, append(attempts, history.Attempt{ID: 99, Key: "k3", Stored: true, DotAt: 2})...)
	require.Len(t, doubled.Findings, 1)
	require.Equal(t, "k3", doubled.Findings[0].Key)
	require.Equal(t, verify.Fail, doubled.Findings[0].Verdict)
	require.Equal(t, 1, doubled.checked[0].Findings)

	other := judge(fault, append(attempts, history.Attempt{ID: 99, Key: "other", Stored: true}, history.Attempt{ID: 100, Key: "other", Stored: true})...)
	require.Empty(t, other.Findings, "mails that were not struck are at-most-one's")

	require.Equal(t, verify.Fail, judge(fault).Findings[0].Verdict, "lost altogether")
	require.Equal(t, verify.Invalid, judge(history.Fault{Name: faultWoken}).Findings[0].Verdict)
}
