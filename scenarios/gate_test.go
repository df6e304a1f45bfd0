package scenarios

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
	"mailproof/reports"
	"mailproof/verify"
)

// passedGate is the summary of a run in which every cell of the gate passed.
func passedGate(t *testing.T) reports.Summary {
	t.Helper()
	chosen, _, err := GateScenarios(All(Draw{RealDelays: true}), Criteria())
	require.NoError(t, err)
	sum := reports.Summary{Verdict: verify.Pass, Seed: 7, RunID: "20260301-120000-7"}
	for _, s := range chosen {
		for _, c := range s.Cells {
			cell := reports.Scenario{
				Name: s.Name, Policy: c.Policy, Verdict: verify.Pass, Seconds: 10, Dir: cellFolder(s, c),
				RetryDelays: s.System.RetryDelays, MaxAttempts: s.System.MaxAttempts,
				Counts: verify.Counts{Confirmed: 520, Delivered: 520},
			}
			names := slices.Clone(s.Invariants)
			for _, k := range Criteria() {
				if slices.Contains(k.From, s.Name) {
					names = append(names, k.By...)
				}
			}
			slices.Sort(names)
			for _, name := range slices.Compact(names) {
				cell.Invariants = append(cell.Invariants, reports.Checked{Name: name, Looked: 520})
			}
			for _, f := range s.FaultNames {
				cell.Faults = append(cell.Faults, reports.FaultResult{Name: f, Outcome: history.Installed, Witness: "520 seen", Count: 520})
			}
			for _, q := range mainQueues() {
				cell.Queues = append(cell.Queues, history.QueueState{Name: q, Type: "quorum", Leader: "r1@localhost", Members: 3, Online: 3})
			}
			sum.Scenarios = append(sum.Scenarios, cell)
		}
	}
	return sum
}

func again(ids ...string) string { return "mailproof gate --only " + strings.Join(ids, ",") }

func criterion(t *testing.T, g reports.Gate, id string) reports.Criterion {
	t.Helper()
	i := slices.IndexFunc(g.Criteria, func(c reports.Criterion) bool { return c.ID == id })
	require.NotEqual(t, -1, i, id)
	return g.Criteria[i]
}

// editCell changes one cell of a summary.
func editCell(sum *reports.Summary, name string, change func(*reports.Scenario)) {
	for i := range sum.Scenarios {
		if s := &sum.Scenarios[i]; s.Name == name || s.Name+"/"+s.Policy == name {
			change(s)
		}
	}
}

// struck says that a fault struck so many times.
func struck(fault string, n int) func(*reports.Scenario) {
	return func(s *reports.Scenario) {
		for i := range s.Faults {
			if s.Faults[i].Name == fault {
				s.Faults[i].Count = n
			}
		}
	}
}

// finds adds a finding to a cell, as its judge would.
func finds(v verify.Verdict, invariant string) func(*reports.Scenario) {
	return func(s *reports.Scenario) {
		s.Findings = append(s.Findings, verify.Finding{Invariant: invariant, Verdict: v, Key: "ticket:1", Text: "planted"})
		s.Verdict = verify.Worse(s.Verdict, v)
	}
}

func TestAGateWhoseCellsPassedPasses(t *testing.T) {
	t.Parallel()
	g := JudgeGate(passedGate(t), decidable(), again)
	require.Equal(t, verify.Pass, g.Verdict, "%+v", g.Red())
	require.False(t, g.Short)
	for _, c := range g.Criteria {
		require.Equal(t, verify.Pass, c.Verdict, c.ID)
		require.NotEmpty(t, c.Figure)
		require.NotContains(t, c.Figure, "%!")
		require.NotEmpty(t, c.Evidence)
		require.Equal(t, "mailproof gate --only "+c.ID, c.Command)
	}
	require.Contains(t, criterion(t, g, "AC4").Figure, "(4 allowed) at 10s, 1m, 5m, then 0 of 520 DEAD, 0 dead letters")
	require.Contains(t, criterion(t, g, "AC2").Figure, "q.notify.dlq quorum, 3 members, leader r1@localhost")
	require.Equal(t, []string{"t6.1-resend/queues.txt"}, criterion(t, g, "AC2").Evidence)
	require.Equal(t, []string{"t6.2/resend", "t6.2/hold"}, criterion(t, g, "AC3").Cells)
}

// decidable are the criteria whose cells exist.
func decidable() []Criterion {
	return slices.DeleteFunc(Criteria(), func(c Criterion) bool { return len(cellsOf(c.From[0])) == 0 })
}

// What befalls a cell decides exactly the criteria that rest on it.
func TestACriterionIsAsGoodAsItsCells(t *testing.T) {
	t.Parallel()
	gone := func(name string) func(*reports.Summary) {
		return func(sum *reports.Summary) {
			sum.Scenarios = slices.DeleteFunc(sum.Scenarios, func(s reports.Scenario) bool { return s.Name+"/"+s.Policy == name })
		}
	}
	edit := func(name string, change func(*reports.Scenario)) func(*reports.Summary) {
		return func(sum *reports.Summary) { editCell(sum, name, change) }
	}
	nothing := map[string]verify.Verdict{}
	for _, c := range decidable() {
		nothing[c.ID] = verify.Invalid
	}
	const pass, fail, invalid, unknown, broken, skipped = verify.Pass, verify.Fail, verify.Invalid, verify.Unknown, verify.HarnessError, verify.SkippedRun
	for _, c := range []struct {
		name   string
		change func(*reports.Summary)
		want   map[string]verify.Verdict // those that are no pass
		says   string                    // in the reason of the first of them
	}{
		{"one mail doubled", edit("t6.1", finds(fail, "at-most-one")), map[string]verify.Verdict{"AC1": fail}, "at-most-one ticket:1: planted"},
		{"a classic queue", edit("t6.1", finds(fail, "quorum-queues")), map[string]verify.Verdict{"AC2": fail}, "quorum-queues"},
		{"a classic queue in another cell", edit("t6.8", finds(fail, "quorum-queues")), map[string]verify.Verdict{"AC2": fail}, "t6.8/resend: quorum-queues"},
		{"no list of queues", edit("t6.1", func(s *reports.Scenario) { s.Queues = nil }), map[string]verify.Verdict{"AC2": invalid}, "no queue q.notify.ticket"},
		{"the dead-letter queue is not listed", edit("t6.1", func(s *reports.Scenario) { s.Queues = s.Queues[:0:0] }), map[string]verify.Verdict{"AC2": invalid}, "no queue"},
		{"one policy fails", edit("t6.2/hold", finds(fail, "nothing-lost")), map[string]verify.Verdict{"AC3": fail}, "nothing-lost"},
		{"a try too many", edit("t6.3", finds(fail, "exact-tries")), map[string]verify.Verdict{"AC4": fail}, "exact-tries"},
		{"given up early", edit("t6.3", finds(fail, "dead-justified")), map[string]verify.Verdict{"AC4": fail}, "dead-justified"},
		{"a hot loop", edit("t6.3", finds(fail, noHotLoop)), map[string]verify.Verdict{"AC8": fail}, noHotLoop},
		{"retries too early", edit("t6.3", finds(fail, "retry-discipline")), map[string]verify.Verdict{"AC4": fail, "AC8": fail}, "retry-discipline"},
		{"lost while SMTP is down", edit("t6.3", finds(fail, "nothing-lost")), map[string]verify.Verdict{"AC4": fail, "AC8": fail}, ""},
		{"the CPU was not measured", edit("t6.3", finds(invalid, noHotLoop)), map[string]verify.Verdict{"AC8": invalid}, ""},
		{"dead-justified claims nothing of another cell", edit("t6.4", finds(fail, "dead-justified")), map[string]verify.Verdict{"AC5": fail}, ""},
		{"what the criterion is about is said first", edit("t6.4", func(s *reports.Scenario) {
			finds(fail, "retry-discipline")(s)
			finds(fail, deadAtOnce)(s)
			finds(fail, stillTried)(s)
		}), map[string]verify.Verdict{"AC5": fail}, deadAtOnce},
		{"one event of all was doubled", edit("t6.1", struck("duplicate-records", 1)), map[string]verify.Verdict{"AC1": invalid}, "duplicate-records struck 1 times, the floor is 500"},
		{"one stranger's event", edit("t6.1", struck("foreign-duplicate", 1)), map[string]verify.Verdict{"AC1": invalid}, "foreign-duplicate struck 1 times"},
		{"killed three times under one policy", edit("t6.2/hold", struck("kill-while-held", 3)), map[string]verify.Verdict{"AC3": invalid}, "t6.2/hold: kill-while-held struck 3 times"},
		{"a fault that left no record", edit("t6.2/resend", func(s *reports.Scenario) { s.Faults = nil }), map[string]verify.Verdict{"AC3": invalid}, "struck 0 times"},
		{"another's ticket", edit("t6.1", finds(fail, "content-and-recipient")), map[string]verify.Verdict{"AC1": fail}, "content-and-recipient"},
		{"a cell is missing", gone("t6.8/resend"), map[string]verify.Verdict{"AC7": invalid}, "the run holds no cell t6.8/resend"},
		{"one cell of two is missing", gone("t6.2/hold"), map[string]verify.Verdict{"AC3": invalid}, "the run holds no cell t6.2/hold"},
		{"a shared cell is missing", gone("t6.3/resend"), map[string]verify.Verdict{"AC4": invalid, "AC8": invalid}, ""},
		{"a cell proves nothing", edit("t6.1", finds(invalid, "assurance")), map[string]verify.Verdict{"AC1": invalid, "AC2": invalid}, ""},
		{"the harness failed", edit("t6.4", finds(broken, "harness")), map[string]verify.Verdict{"AC5": broken}, ""},
		{"a cell that broke at its start", edit("t6.3", func(s *reports.Scenario) {
			*s = reports.Scenario{Name: s.Name, Policy: s.Policy, Dir: s.Dir}
			finds(broken, "harness")(s)
		}), map[string]verify.Verdict{"AC4": broken, "AC8": broken}, "harness"},
		{"still moving at the bound", edit("t6.8", finds(unknown, "quiesced")), map[string]verify.Verdict{"AC7": unknown}, ""},
		{"a fail outweighs an invalid run", edit("t6.8", func(s *reports.Scenario) {
			finds(invalid, "assurance")(s)
			finds(fail, "at-most-one")(s)
		}), map[string]verify.Verdict{"AC7": fail}, "at-most-one"},
		{"skipped is not passed", edit("t6.8", func(s *reports.Scenario) { s.Verdict = skipped }), map[string]verify.Verdict{"AC7": skipped}, "cell t6.8/resend is skipped"},
		{"a verdict without a finding", edit("t6.3", func(s *reports.Scenario) { s.Verdict = fail }), map[string]verify.Verdict{"AC4": fail, "AC8": fail}, ""},
		{"an invariant that looked at nothing", edit("t6.4", func(s *reports.Scenario) {
			for i := range s.Invariants {
				if s.Invariants[i].Name == deadAtOnce {
					s.Invariants[i].Looked = 0
				}
			}
		}), map[string]verify.Verdict{"AC5": invalid}, "had nothing to look at"},
		{"an invariant that was skipped", edit("t6.1", func(s *reports.Scenario) {
			for i := range s.Invariants {
				if s.Invariants[i].Name == "quorum-queues" {
					s.Invariants[i].Skipped = "the broker's queues were not recorded"
				}
			}
		}), map[string]verify.Verdict{"AC2": invalid}, "were not recorded"},
		{"an invariant that is not there", edit("t6.8", func(s *reports.Scenario) { s.Invariants = nil }), map[string]verify.Verdict{"AC7": invalid}, "was not judged"},
		{
			"shortened delays", edit("t6.3", func(s *reports.Scenario) { s.RetryDelays = []time.Duration{time.Second} }),
			map[string]verify.Verdict{"AC4": skipped, "AC8": skipped},
			"the delays were 1s, and only 10s, 1m, 5m decide it",
		},
		{"shortened delays hide no failure", edit("t6.3", func(s *reports.Scenario) {
			s.RetryDelays = []time.Duration{time.Second}
			finds(fail, "exact-tries")(s)
		}), map[string]verify.Verdict{"AC4": fail, "AC8": skipped}, "exact-tries"},
		{"nothing was run", func(sum *reports.Summary) { sum.Scenarios = nil }, nothing, "the run holds no cell"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			sum := passedGate(t)
			c.change(&sum)
			g := JudgeGate(sum, decidable(), again)
			got, worst, first := map[string]verify.Verdict{}, pass, ""
			for _, k := range g.Criteria {
				worst = verify.Worse(worst, k.Verdict)
				if k.Verdict == pass {
					require.Empty(t, k.Reason)
					continue
				}
				got[k.ID] = k.Verdict
				require.NotEmpty(t, k.Reason, k.ID)
				if first == "" {
					first = k.Reason
				}
			}
			require.Equal(t, c.want, got)
			require.Contains(t, first, c.says)
			require.Equal(t, worst, g.Verdict)
			require.Equal(t, strings.HasPrefix(c.name, "shortened delays"), g.Short)
		})
	}
}

func TestOnlySomeCriteriaAreDecidedFromTheirOwnCells(t *testing.T) {
	t.Parallel()
	some, err := ChooseCriteria(Criteria(), []string{"ac7", "AC5"})
	require.NoError(t, err)
	chosen, beside, err := GateScenarios(All(Draw{}), some)
	require.NoError(t, err)
	require.Equal(t, []string{"t6.4", "t6.8"}, list(chosen))
	require.Empty(t, beside)
	g := JudgeGate(passedGate(t), some, again)
	require.Len(t, g.Criteria, 2)
	require.Equal(t, verify.Pass, g.Verdict)

	_, err = ChooseCriteria(Criteria(), []string{"AC9"})
	require.ErrorContains(t, err, `no criterion is called "AC9"; there are AC1, AC2`)
}

func TestAGateRunsEachCellOnceAndTheLongOneBesideTheOthers(t *testing.T) {
	t.Parallel()
	chosen, beside, err := GateScenarios(All(Draw{RealDelays: true}), Criteria())
	require.NoError(t, err)
	require.Equal(t, []string{"t6.3/resend"}, beside)
	seen := map[string]bool{}
	for _, s := range chosen {
		for _, c := range s.Cells {
			id := place{scenario: s, cell: c}.id()
			require.False(t, seen[id], id)
			seen[id] = true
		}
	}
	for _, c := range Criteria() {
		for _, from := range c.From {
			for _, id := range cellsOf(from) {
				require.True(t, seen[id], id)
			}
		}
		require.NotEmpty(t, c.By, c.ID)
	}
}

// Each criterion's name stands for its cells, and names only checkers that there
// are.
func TestCriteriaAreScenariosByName(t *testing.T) {
	t.Parallel()
	for _, c := range decidable() {
		chosen, err := Select(All(Draw{}), []string{strings.ToLower(c.ID)})
		require.NoError(t, err, c.ID)
		require.NotEmpty(t, chosen)
		for _, s := range chosen {
			require.Contains(t, strings.Join(c.From, " "), s.Name)
			for _, name := range c.By {
				if slices.Contains(verify.Names(), name) {
					require.Contains(t, s.Invariants, name, "%s of %s", name, c.ID)
				}
			}
		}
	}
	require.True(t, AsksForRealDelays([]string{"t6.1", "ac4"}))
	require.False(t, AsksForRealDelays([]string{"t6.3", "ac3"}))
}

func TestAGateIsDecidedAgainFromItsFolder(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sum := passedGate(t)
	_, ok, err := JudgeGateAgain(dir, sum)
	require.NoError(t, err)
	require.False(t, ok, "no gate.json: the run was no gate")

	some, err := ChooseCriteria(Criteria(), []string{"AC1", "AC2"})
	require.NoError(t, err)
	g := JudgeGate(sum, some, again)
	g.Only = []string{"AC1", "AC2"}
	require.NoError(t, reports.WriteGate(dir, g))
	second, ok, err := JudgeGateAgain(dir, sum)
	require.NoError(t, err)
	require.True(t, ok)
	require.Equal(t, g.Criteria, second.Criteria)

	// What the evidence says now counts, not what was said before.
	editCell(&sum, "t6.1", finds(verify.Fail, "one-row-per-key"))
	second, _, err = JudgeGateAgain(dir, sum)
	require.NoError(t, err)
	require.Equal(t, verify.Fail, criterion(t, second, "AC1").Verdict)

	require.NoError(t, os.WriteFile(filepath.Join(dir, reports.GateFile), []byte("{"), 0o600))
	_, _, err = JudgeGateAgain(dir, sum)
	require.ErrorContains(t, err, reports.GateFile)
}

// The summary of a gate on real parts, as it was left in its folder (without
// statements and guarantees). It is from before t6.6.
func TestASavedGateIsDecidedAsItWas(t *testing.T) {
	t.Parallel()
	sum, err := reports.Read(filepath.Join("testdata", "gate"))
	require.NoError(t, err)
	g := JudgeGate(sum, Criteria(), again)
	require.False(t, g.Short)
	for _, c := range g.Criteria {
		if c.ID == "AC6" {
			require.Equal(t, verify.Invalid, c.Verdict)
			require.Contains(t, c.Reason, "the run holds no cell t6.6")
			continue
		}
		require.Equal(t, verify.Pass, c.Verdict, "%s: %s", c.ID, c.Reason)
	}
	require.Equal(t, verify.Invalid, g.Verdict)
	for id, figure := range map[string]string{
		"AC1": "five records per event and one of a stranger (1060 records more): 550 of 550 mails delivered, 0 copies more, 0 lost",
		"AC2": "q.notify.ticket quorum, 3 members, leader r1@localhost; q.notify.marketing quorum, 3 members, leader r3@localhost; " +
			"q.notify.dlq quorum, 3 members, leader r2@localhost; 50 of 50 queues of the run are quorum queues",
		"AC3": "52 SIGKILLs, 44 of them with a session held: resend 550 of 550 delivered, 20 copies more, 1 UNKNOWN, 0 lost; " +
			"hold 513 of 550 delivered, 0 copies more, 55 UNKNOWN, 0 lost",
		"AC4": "4 tries per mail (4 allowed) at 10s, 1m, 5m, then 520 of 520 DEAD, 520 dead letters",
		"AC8": "notifyd 1.5 % of a core with the server down, 1.0 % idle (< 30 %); 4 deliveries per mail",
	} {
		require.Equal(t, figure, criterion(t, g, id).Figure)
	}
}
