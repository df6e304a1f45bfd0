package scenarios

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// tabled is a history with one cell of the table.
func tabled(edit func(*history.Fault)) *history.History {
	p := CrashPoints()[0]
	f := history.Fault{
		Name: faultOf(p, actKill), Target: "bookingd", Start: 1, End: 2, Outcome: history.Installed,
		Witness: "process 7 took \"kill\"", Count: 1, Keys: []string{"k1", "k2"},
	}
	if edit != nil {
		edit(&f)
	}
	return &history.History{
		Meta: &history.Meta{Policy: "resend"}, Final: &history.Final{Rows: []history.MailState{{Key: "k1", State: "sent"}, {Key: "k2", State: "dead"}}},
		Faults:   []history.Fault{f, {Name: "lose-250"}},
		Attempts: []history.Attempt{{Key: "k1", Stored: true}, {Key: "k1", Stored: true}, {Key: "k2"}, {Key: "k3", Stored: true}},
	}
}

func cellOfTable(t *testing.T, h *history.History, findings ...verify.Finding) (CrashCell, CrashTable) {
	t.Helper()
	var table CrashTable
	table.add(h, reports.Scenario{Name: "crash-booking", Policy: "resend", Seed: 5, Findings: findings})
	require.Len(t, table.Cells(), 1)
	return table.Cells()[0], table
}

func TestACellTellsWhatBecameOfItsMails(t *testing.T) {
	t.Parallel()
	c, table := cellOfTable(t, tabled(nil))
	require.Equal(t, verify.Pass, c.Verdict)
	require.Equal(t, []int{1, 2, 2, 1}, []int{c.Hits, c.Mails, c.Copies, c.Extra})
	require.Equal(t, "pass, 2, **+1**, 1 DEAD", c.short())
	require.Equal(t, "bin/mailproof crash-table --point booking.before-commit --policy resend --act kill --seed 5", c.Command)
	require.True(t, table.Has("resend", c.Point, actKill))
	require.False(t, table.Has("resend", c.Point, actPause))
	require.Equal(t, verify.Invalid, table.Verdict(), "cells that were not run are not green")
	require.Contains(t, table.Markdown(), "*not run*")
}

// A cell whose process was not seen at the boundary proves nothing.
func TestACellWithoutAWitnessIsInvalid(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*history.Fault){
		"no witness": func(f *history.Fault) {
			f.Witness, f.Reason = "", "10 batches of 6 led no chosen process past the point"
		},
		"no hit":  func(f *history.Fault) { f.Count = 0 },
		"unknown": func(f *history.Fault) { f.Outcome = history.Indeterminate },
	} {
		c, table := cellOfTable(t, tabled(edit))
		require.Equal(t, verify.Invalid, c.Verdict, name)
		require.False(t, table.Has("resend", c.Point, actKill), name)
	}
}

func TestAFindingIsItsMailsCells(t *testing.T) {
	t.Parallel()
	lost := verify.Finding{Invariant: "nothing-lost", Verdict: verify.Fail, Key: "k2", Text: "gone"}
	c, table := cellOfTable(t, tabled(nil), lost)
	require.Equal(t, verify.Fail, c.Verdict)
	require.Empty(t, table.Loose)
	require.Equal(t, verify.Fail, table.Verdict())
	require.Contains(t, table.Markdown(), "fail nothing-lost k2: gone")

	of := verify.Finding{Invariant: "assurance", Verdict: verify.Invalid, Text: "fault " + c.Point.faultName() + " on bookingd was installed, and nothing witnesses that it struck"}
	c, table = cellOfTable(t, tabled(nil), of)
	require.Equal(t, verify.Invalid, c.Verdict)
	require.Empty(t, table.Loose)

	nobodys := verify.Finding{Invariant: "queue-conservation", Verdict: verify.Fail, Text: "a queue is not empty"}
	c, table = cellOfTable(t, tabled(nil), nobodys)
	require.Equal(t, verify.Pass, c.Verdict)
	require.Len(t, table.Loose, 1)
	require.Equal(t, verify.Fail, table.Verdict())
	require.Equal(t, 1, strings.Count(table.Markdown(), "a queue is not empty"))
}

// Evidence that is not whole makes no cell green, and a later run of the scenario
// takes the place of what an earlier one found of no cell.
func TestBrokenEvidenceMakesNoCellGreen(t *testing.T) {
	t.Parallel()
	refused := verify.Finding{Invariant: "well-formed-history", Verdict: verify.HarnessError, Text: "a record was refused"}
	c, table := cellOfTable(t, tabled(nil), refused)
	require.Equal(t, verify.HarnessError, c.Verdict)
	require.Len(t, table.Loose, 1)
	table.add(tabled(nil), reports.Scenario{Name: "crash-booking", Policy: "resend", Seed: 6})
	require.Empty(t, table.Loose)
	require.Equal(t, verify.Pass, table.Cells()[0].Verdict)
}

func (p CrashPoint) faultName() string { return faultOf(p, actKill) }

func TestPointsAreChosenByTheBeginningOfTheirNames(t *testing.T) {
	t.Parallel()
	chosen := func(filter string) (ids []string) {
		for _, p := range CrashPoints() {
			if p.Fits(filter) {
				ids = append(ids, p.ID())
			}
		}
		return ids
	}
	require.Equal(t, []string{"outbox.before-mark@bookingd", "outbox.before-mark@notifyd"}, chosen("outbox.before-mark"))
	require.Equal(t, []string{"outbox.before-mark@notifyd"}, chosen("outbox.before-mark@notifyd"))
	require.Len(t, chosen("smtp"), 7)
	require.Len(t, chosen("smtp."), 7)
	require.Empty(t, chosen("outbox.before"), "half a word is nobody's")
	require.Equal(t, []string{"worker.after-settle"}, chosen("worker.after-settle"), "the name of one is not the beginning of others")
	require.Equal(t, []string{"worker.after-settle+later"}, chosen("worker.after-settle+later"))
}
