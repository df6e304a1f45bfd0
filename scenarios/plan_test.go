package scenarios

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"mailproof/faults"
	"mailproof/loadgen"
	"mailproof/verify"
)

func TestPlanDependsOnSeedScenarioAndLoadAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		load := Load{
			Baseline:  rapid.IntRange(0, 50).Draw(t, "baseline"),
			Bookings:  rapid.IntRange(0, 300).Draw(t, "bookings"),
			PerSecond: rapid.Float64Range(1, 500).Draw(t, "rate"),
		}
		plan := mustPlan(t, seed, "t6.7", load)
		require.Equal(t, plan, mustPlan(t, seed, "t6.7", load))
		all := append(slices.Clone(plan.Baseline), plan.Faults...)
		require.Len(t, all, load.Baseline+load.Bookings)
		seen := map[string]bool{}
		for _, b := range all {
			require.False(t, seen[b.ID] || seen[b.Recipient], "a mail has a booking and a recipient of its own")
			seen[b.ID], seen[b.Recipient] = true, true
		}
		require.True(t, slices.IsSortedFunc(plan.Faults, func(a, b Booking) int { return int(a.At - b.At) }))
		if len(all) > 0 {
			require.NotEqual(t, plan, mustPlan(t, seed+1, "t6.7", load))
			require.NotEqual(t, plan, mustPlan(t, seed, "t6.1", load))
		}
	})
}

func mustPlan(t require.TestingT, seed uint64, scenario string, l Load) Plan {
	plan, err := drawPlan(seed, scenario, l)
	require.NoError(t, err)
	return plan
}

// A seed that somebody wrote down a year ago gives the run of that day.
func TestPlanOfASeedStaysTheSame(t *testing.T) {
	t.Parallel()
	plan := mustPlan(t, 7, "t6.7", Load{Baseline: 20, Bookings: 580, PerSecond: 40})
	require.Equal(t, Booking{ID: "23c6982f-3169-4398-bbf5-b2de2a9ed3a3", Recipient: "base0001@customers.test", At: 8876809}, plan.Baseline[0])
	require.Equal(t, Booking{ID: "0626397d-9827-42f9-ad94-cd021c33f8b7", Recipient: "guest0580@customers.test", At: 14346402529}, plan.Faults[579])
}

func TestCancelsLeaveTheRestOfThePlanAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		load := Load{Baseline: 10, Bookings: rapid.IntRange(0, 200).Draw(t, "bookings"), PerSecond: 50}
		plain := mustPlan(t, seed, "t6.6", load)
		load.Cancels = rapid.IntRange(0, 250).Draw(t, "cancels")
		plan := mustPlan(t, seed, "t6.6", load)
		cancelled := 0
		for i := range plan.Faults {
			if after := plan.Faults[i].CancelAfter; after > 0 {
				cancelled++
				require.LessOrEqual(t, after, cancelWithin)
				plan.Faults[i].CancelAfter = 0
			}
		}
		require.Equal(t, min(load.Cancels, load.Bookings), cancelled)
		require.Equal(t, load.Baseline+load.Bookings+cancelled, load.Operations())
		require.Equal(t, plain, plan)
	})
}

func TestScheduleHoldsEachOperationOnceInOrder(t *testing.T) {
	t.Parallel()
	plan := mustPlan(t, 1, "t6.6", Load{Bookings: 100, PerSecond: 50, Cancels: 30})
	made := schedule(plan.Faults)
	require.Len(t, made, 130)
	require.True(t, slices.IsSortedFunc(made, func(a, b loadgen.Arrival[action]) int { return int(a.At - b.At) }))
	confirmed := map[string]time.Duration{}
	for _, a := range made {
		if !a.Op.cancel {
			confirmed[a.Op.ID] = a.At
			continue
		}
		require.Contains(t, confirmed, a.Op.ID, "a cancel comes after its confirmation")
		require.Equal(t, a.Op.CancelAfter, a.At-confirmed[a.Op.ID])
	}
	require.Len(t, confirmed, 100)
}

func TestPlanWithoutARateIsRefused(t *testing.T) {
	t.Parallel()
	_, err := drawPlan(1, "t6.6", Load{Bookings: 1})
	require.ErrorContains(t, err, "0 arrivals per second")
}

func TestRateOfAPlanIsTheOneAskedFor(t *testing.T) {
	t.Parallel()
	plan := mustPlan(t, 1, "t6.7", Load{Bookings: 5000, PerSecond: 100})
	require.InDelta(t, 50, span(plan.Faults).Seconds(), 3)
	require.Zero(t, span(plan.Baseline))
}

func TestFaultsAreDrawnFromTheSeed(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		who := recipients(mustPlan(t, seed, "t6.7", Load{Bookings: 100, PerSecond: 100}).Faults)
		losses := faults.DrawLosses(rng(seed, "t6.7", "lose-250"), who, 0.2, faults.OverSMTP())
		require.Equal(t, losses, faults.DrawLosses(rng(seed, "t6.7", "lose-250"), who, 0.2, faults.OverSMTP()))
		require.Len(t, losses, 20)
		require.Equal(t, drawStrikes(rng(seed, "t6.2", "kills")), drawStrikes(rng(seed, "t6.2", "kills")))
		require.Equal(t,
			drawGaps(rng(seed, "t6.2", "g"), 5, time.Second, 2*time.Second),
			drawGaps(rng(seed, "t6.2", "g"), 5, time.Second, 2*time.Second))
	})
}

func TestStrikesCoverEveryStageAtLeastTwentyTimes(t *testing.T) {
	t.Parallel()
	strikes := drawStrikes(rng(1, "t6.2", "kills"))
	require.GreaterOrEqual(t, len(strikes), 20)
	stages := map[string]int{}
	for _, s := range strikes {
		stages[s.String()]++
	}
	require.Len(t, stages, 10)
	for stage, n := range stages {
		require.GreaterOrEqual(t, n, 2, stage)
	}
}

func TestScenariosAreWellFormed(t *testing.T) {
	t.Parallel()
	for _, real := range []bool{false, true} {
		seen := map[string]bool{}
		for _, s := range All(Draw{RealDelays: real}) {
			require.False(t, seen[s.Name], "%s stands twice", s.Name)
			seen[s.Name] = true
			require.GreaterOrEqual(t, s.Load.Baseline+s.Load.Bookings, s.Floors.Confirmed, s.Name)
			if s.FaultsOf == nil {
				require.GreaterOrEqual(t, s.Floors.Confirmed, 500, s.Name)
				require.Len(t, s.FaultNames, s.Floors.Faults, s.Name)
			} else {
				// Few mails at each of many places: what counts is that each was struck.
				require.GreaterOrEqual(t, s.Floors.Confirmed, s.Load.Baseline, s.Name)
			}
			require.Greater(t, s.System.Lease, s.System.SendDeadline, s.Name)
			require.NotZero(t, s.Expect, s.Name)
			require.Subset(t, verify.Names(), s.Invariants, s.Name)
			require.Len(t, s.System.RetryDelays, s.System.MaxAttempts-1, "%s: N tries have N-1 delays between them", s.Name)
		}
	}
}

func TestSelect(t *testing.T) {
	t.Parallel()
	all := All(Draw{})
	cells := func(names ...string) []string {
		chosen, err := Select(all, names)
		require.NoError(t, err)
		var got []string
		for _, s := range chosen {
			for _, c := range s.Cells {
				got = append(got, s.Name+"/"+c.Name())
			}
		}
		return got
	}
	require.Len(t, cells(), 28, "without those on demand")
	require.Equal(t, []string{"t6.2/resend", "t6.2/hold"}, cells("t6.2"))
	require.Equal(t, []string{"t6.2/hold"}, cells("t6.2/hold"))
	require.Equal(t, []string{"t6.7/same-key-http"}, cells("t6.7/same-key-http"))
	require.Equal(t, []string{"t6.7/resend", "t6.2/hold"}, cells("t6.2/hold", "t6.7/resend"))
	require.Equal(t, []string{"t6.2/resend", "t6.2/hold"}, cells("t6.2", "t6.2/hold"), "the whole outweighs a part of it")
	_, err := Select(all, []string{"t6.9"})
	require.ErrorContains(t, err, `"t6.9"`)
	require.ErrorContains(t, err, "t6.7")
	_, err = Select(all, []string{"t6.1/hold"})
	require.ErrorContains(t, err, "resend")
}
