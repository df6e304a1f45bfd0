package scenarios

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/infra"
	"mailproof/reports"
	"mailproof/target"
	"mailproof/verify"
)

// fakeLab opens benches in memory: a target that settles each mail after a
// while, beside a server that is a slice of attempts.
type fakeLab struct {
	clock  func() int64
	settle time.Duration     // from the confirmation to the copy; 0: never
	adjust func(*fakeTarget) // before it is used
	mu     sync.Mutex
	opened []*fakeTarget            // one per cell
	failed error                    // of Open
	unrest func() map[string]string // between the parts
}

func (l *fakeLab) Versions() infra.Versions {
	return infra.Versions{Postgres: "15.0", RabbitMQ: "3.10", Kafka: "4.3", KafkaKind: "kfake"}
}

func (l *fakeLab) Open(_ context.Context, o Order) (*Bench, error) {
	if l.failed != nil {
		return nil, l.failed
	}
	t := &fakeTarget{clock: l.clock, settle: l.settle, mails: map[string]*fakeMail{}}
	if l.adjust != nil {
		l.adjust(t)
	}
	l.mu.Lock()
	l.opened = append(l.opened, t)
	l.mu.Unlock()
	b := &Bench{
		Order: o, Target: t, Attempts: t.kept, Stored: t.kept,
		Evidence: func(context.Context) ([]history.Record, error) { return t.ledger(), nil },
		Close:    func(context.Context) error { t.closed = true; return nil },
	}
	if l.unrest != nil {
		b.Unrest = func(context.Context) (map[string]string, error) { return l.unrest(), nil }
	}
	return b, nil
}

type fakeMail struct {
	booking, recipient string
	at                 int64
}

type fakeTarget struct {
	clock  func() int64
	settle time.Duration
	// unsure makes the first answer for each booking unknown.
	unsure bool
	// slow is how long each answer takes.
	slow time.Duration
	// twice makes the far side keep a second copy of the first mail.
	twice bool
	// reason of a mail that waits; it may change with each call.
	reason func(booking string) string
	closed bool

	mu    sync.Mutex
	mails map[string]*fakeMail
	order []string
}

func (*fakeTarget) Name() string                 { return "fake" }
func (*fakeTarget) Processes() []target.Process  { return nil }
func (*fakeTarget) Databases() []target.Database { return nil }
func (*fakeTarget) Stop(context.Context) error   { return nil }

func (*fakeTarget) Cancel(context.Context, string) history.OpOutcome { return history.OpFail }

func (*fakeTarget) Key(booking string, _ int) string { return "ticket:" + booking }

func (t *fakeTarget) Confirm(ctx context.Context, booking, recipient string) history.OpOutcome {
	pause(ctx, t.slow)
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, again := t.mails[booking]; again {
		return history.OpOK
	}
	t.mails[booking] = &fakeMail{booking: booking, recipient: recipient, at: t.clock()}
	t.order = append(t.order, booking)
	if t.unsure {
		return history.OpUnknown
	}
	return history.OpOK
}

func (t *fakeTarget) settled(m *fakeMail) bool {
	return t.settle > 0 && t.clock() >= m.at+int64(t.settle)
}

func (t *fakeTarget) Pending(context.Context) (map[string]string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting := map[string]string{}
	for _, m := range t.mails {
		if t.settled(m) {
			continue
		}
		waiting[t.Key(m.booking, 1)] = t.why(m.booking)
	}
	return waiting, nil
}

func (t *fakeTarget) why(booking string) string {
	if t.reason != nil {
		return t.reason(booking)
	}
	return "PENDING, no message of it is anywhere"
}

func (t *fakeTarget) kept() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, m := range t.mails {
		if t.settled(m) {
			n++
		}
	}
	return n
}

func (t *fakeTarget) ledger() []history.Record {
	t.mu.Lock()
	defer t.mu.Unlock()
	var records []history.Record
	for i, booking := range t.order {
		m := t.mails[booking]
		if !t.settled(m) {
			continue
		}
		at := m.at + int64(t.settle)
		records = append(records, history.Record{T: at, Kind: history.KindAttempt, Attempt: &history.Attempt{
			ID: int64(len(records) + 1), Transport: "smtp", Subject: "about " + booking, Client: "fake", Key: t.Key(booking, 1), MessageID: "<" + booking + "@x>",
			Recipient: m.recipient, From: at - 1, DotAt: at, To: at, Stage: "replied", Stored: true, ReplyWritten: true, Reply: "250 ok",
		}})
		if t.twice && i == 0 {
			second := *records[0].Attempt
			second.ID, second.From, second.DotAt, second.To = 2, at+1, at+2, at+2
			records = append(records, history.Record{T: at + 2, Kind: history.KindAttempt, Attempt: &second})
		}
	}
	return records
}

func (t *fakeTarget) Final(context.Context) (history.Final, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var f history.Final
	for _, m := range t.mails {
		state := "sent"
		if !t.settled(m) {
			state = "pending"
		}
		if !t.settled(m) {
			if f.Pending == nil {
				f.Pending = map[string]string{}
			}
			f.Pending[t.Key(m.booking, 1)] = t.why(m.booking)
		}
		f.Rows = append(f.Rows, history.MailState{Key: t.Key(m.booking, 1), Booking: m.booking, Recipient: m.recipient, State: state})
	}
	return f, nil
}

// fakeFault records its life in a log that several may share.
type fakeFault struct {
	name  string
	log   *callLog
	panic string // "inject", "heal", "witness"
	away  error  // of Available
	n     int
}

type callLog struct {
	mu    sync.Mutex
	calls []string
}

func (l *callLog) add(call string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, call)
}

func (f *fakeFault) Name() string     { return f.name }
func (f *fakeFault) Target() string   { return "fake part" }
func (f *fakeFault) Available() error { return f.away }

func (f *fakeFault) call(what string) {
	f.log.add(what + " " + f.name)
	if f.panic == what {
		panic("planted in " + what)
	}
}

func (f *fakeFault) Inject(context.Context) error { f.call("inject"); f.n++; return nil }
func (f *fakeFault) Heal(context.Context) error   { f.call("heal"); return nil }

func (f *fakeFault) Witness(context.Context) (faults.Witness, error) {
	f.call("witness")
	if f.n == 0 {
		return faults.Witness{}, nil
	}
	return faults.Witness{Text: "seen from the far side", Count: f.n}, nil
}

type quietWatcher struct{}

func (quietWatcher) Cell(int, int, Scenario, Cell) {}
func (quietWatcher) Status(Status)                 {}
func (quietWatcher) Done(reports.Scenario)         {}

// small is a scenario that takes seconds of the fake clock.
func small(fs ...faults.Fault) Scenario {
	return Scenario{
		Name: "test", Title: "a test", Cells: []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 20, Faults: len(fs)},
		Invariants: []string{"nothing-lost", "at-most-one", "quiesced"},
		System:     fast(),
		Load:       Load{Baseline: 5, Bookings: 20, PerSecond: 50},
		Faults:     func(*Bench) []faults.Fault { return fs },
	}
}

// inBubble runs the scenario on a fake clock. change may alter the runner.
func inBubble(t *testing.T, lab *fakeLab, s Scenario, change func(*Runner)) (sum reports.Summary, dir string) {
	t.Helper()
	dir = t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		clock := func() int64 { return int64(time.Since(began)) + 1_000_000 }
		lab.clock = clock
		r := Runner{
			Lab: lab, Dir: dir, Seed: 7, Clock: clock, Watch: quietWatcher{},
			Again: func(cells ...string) string { return fmt.Sprintf("mailproof chaos --scenario %v --seed 7", cells) },
		}
		if change != nil {
			change(&r)
		}
		sum, _ = r.Run(t.Context(), []Scenario{s})
	})
	return sum, dir
}

func loadCell(t *testing.T, dir string) *history.History {
	t.Helper()
	h, err := history.Load(filepath.Join(dir, "test-resend", history.FileName))
	require.NoError(t, err)
	return h
}

func only(t *testing.T, sum reports.Summary) reports.Scenario {
	t.Helper()
	require.Len(t, sum.Scenarios, 1)
	return sum.Scenarios[0]
}

func findings(sc reports.Scenario, v verify.Verdict) []string {
	var all []string
	for _, f := range sc.Findings {
		if f.Verdict == v {
			all = append(all, f.Invariant+" "+f.Key+": "+f.Text)
		}
	}
	return all
}

func TestGreenRunGoesThroughEveryPhaseInOrder(t *testing.T) {
	log := &callLog{}
	lab := &fakeLab{settle: 100 * time.Millisecond}
	sum, dir := inBubble(t, lab, small(&fakeFault{name: "a", log: log}, &fakeFault{name: "b", log: log}), nil)

	sc := only(t, sum)
	require.Equal(t, verify.Pass, sum.Verdict, "%v", sc.Findings)
	require.Equal(t, 25, sc.Counts.Confirmed)
	require.Equal(t, 25, sc.Counts.Delivered)
	require.Equal(t, []string{"inject a", "inject b", "heal b", "heal a", "witness a", "witness b"}, log.calls)
	h := loadCell(t, dir)
	var phases []string
	for _, p := range h.Phases {
		phases = append(phases, p.Name)
	}
	require.Equal(t, []string{"start", "baseline", "faults", "heal", "quiesce", "judge"}, phases)
	require.Len(t, h.Faults, 2)
	require.True(t, lab.opened[0].closed)
	require.Contains(t, sc.Command, "--seed 7")
	require.Contains(t, sc.Command, "test/resend")
}

func TestLatencyCountsFromTheIntendedTime(t *testing.T) {
	sum, _ := inBubble(t, &fakeLab{settle: 100 * time.Millisecond}, small(), nil)
	sc := only(t, sum)
	require.Equal(t, 25, sc.Latency.N)
	require.InDelta(t, 100, sc.Latency.P50, 1)
}

// A generator that ran out of clients measured itself.
func TestArrivalsThatWereNotMadeMakeTheRunInvalid(t *testing.T) {
	lab := &fakeLab{settle: 100 * time.Millisecond, adjust: func(f *fakeTarget) { f.slow = 4 * time.Second }}
	s := small()
	s.Load = Load{Bookings: 600, PerSecond: 2000}
	sum, _ := inBubble(t, lab, s, nil)
	sc := only(t, sum)
	require.Equal(t, verify.Invalid, sum.Verdict)
	require.Equal(t, 512, sc.Counts.Confirmed)
	require.Contains(t, strings.Join(findings(sc, verify.Invalid), "\n"),
		"arrivals : every arrival of the schedule is made; 88 of 600 arrivals were not made: all 512 clients were busy")
}

func TestUnknownOutcomeIsRepeatedWithTheSameBooking(t *testing.T) {
	lab := &fakeLab{settle: 100 * time.Millisecond, adjust: func(f *fakeTarget) { f.unsure = true }}
	sum, dir := inBubble(t, lab, small(), nil)
	require.Equal(t, 25, only(t, sum).Counts.Confirmed)
	h := loadCell(t, dir)
	require.Len(t, h.Ops, 50)
	tries := map[string][]history.OpOutcome{}
	intended := map[string]int64{}
	for _, op := range h.Ops {
		if first, seen := intended[op.Booking]; seen {
			require.Equal(t, first, op.Intended, "a repeated operation keeps its intended time")
		}
		intended[op.Booking] = op.Intended
		tries[op.Booking] = append(tries[op.Booking], op.Outcome)
	}
	for booking, outcomes := range tries {
		require.Equal(t, []history.OpOutcome{history.OpUnknown, history.OpOK}, outcomes, booking)
	}
}

func TestUnpluggedFaultMakesTheRunInvalid(t *testing.T) {
	log := &callLog{}
	sum, _ := inBubble(t, &fakeLab{settle: 100 * time.Millisecond}, small(&fakeFault{name: "a", log: log}),
		func(r *Runner) { r.Unplugged = []string{"a"} })
	sc := only(t, sum)
	require.Equal(t, verify.Invalid, sum.Verdict)
	require.NotEmpty(t, findings(sc, verify.Invalid))
	require.Equal(t, []string{"witness a"}, log.calls, "an unplugged fault is only asked for its witness")
	require.Equal(t, 25, sc.Counts.Delivered, "the system itself worked")
}

func TestUnpluggingAFaultThatDoesNotExistIsRefused(t *testing.T) {
	r := Runner{Unplugged: []string{"lose-25"}}
	err := r.CheckUnplugged(All(Draw{}))
	require.ErrorContains(t, err, "lose-25")
	require.ErrorContains(t, err, "lose-250")
	r.Unplugged = []string{"lose-250"}
	require.NoError(t, r.CheckUnplugged(All(Draw{})))
}

func TestNoTrafficIsInvalid(t *testing.T) {
	sum, dir := inBubble(t, &fakeLab{settle: 100 * time.Millisecond}, small(&fakeFault{name: "a", log: &callLog{}}),
		func(r *Runner) { r.NoTraffic = true })
	require.Equal(t, verify.Invalid, sum.Verdict)
	require.Empty(t, loadCell(t, dir).Ops)
}

func TestFaultThatIsNotAvailableIsSkippedAndMissesTheFloor(t *testing.T) {
	log := &callLog{}
	sum, dir := inBubble(t, &fakeLab{settle: 100 * time.Millisecond},
		small(&fakeFault{name: "a", log: log, away: errors.New("no such part here")}), nil)
	require.Equal(t, verify.Invalid, sum.Verdict)
	require.Empty(t, log.calls)
	f := loadCell(t, dir).Faults[0]
	require.Equal(t, history.Skipped, f.Outcome)
	require.Equal(t, "no such part here", f.Reason)
}

// The canary: a defect that a harness must never miss.
func TestCanaryDuplicateIsRed(t *testing.T) {
	lab := &fakeLab{settle: 100 * time.Millisecond, adjust: func(f *fakeTarget) { f.twice = true }}
	sum, _ := inBubble(t, lab, small(), nil)
	require.Equal(t, verify.Fail, sum.Verdict)
	all := findings(only(t, sum), verify.Fail)
	require.NotEmpty(t, all)
	require.Contains(t, all[0], "at-most-one ticket:")
	require.NotEmpty(t, only(t, sum).Findings[0].Story, "a finding tells the mail's story")
}

func TestStalledSystemFailsWithTheReasonOfEachMail(t *testing.T) {
	sum, dir := inBubble(t, &fakeLab{settle: 0}, small(), nil)
	sc := only(t, sum)
	require.Equal(t, verify.Fail, sum.Verdict)
	all := findings(sc, verify.Fail)
	require.NotEmpty(t, all)
	require.Contains(t, all[0], "PENDING, no message of it is anywhere")
	h := loadCell(t, dir)
	require.Len(t, h.Final.Pending, 25)
	for _, m := range h.Ops {
		require.NotEmpty(t, h.Final.Pending[m.Key])
	}
}

func TestQueueThatNeverEmptiesFails(t *testing.T) {
	lab := &fakeLab{settle: 100 * time.Millisecond, unrest: func() map[string]string {
		return map[string]string{"queue q.notify.retry.1s": "1 message, 0 ready, 0 unacked"}
	}}
	sum, _ := inBubble(t, lab, small(), nil)
	require.Equal(t, verify.Fail, sum.Verdict)
	require.Contains(t, findings(only(t, sum), verify.Fail)[0], "queue q.notify.retry.1s: 1 message")
}

func TestSystemStillMovingAtTheBoundIsUnknown(t *testing.T) {
	n := 0
	states := []string{"SENDING", "FAILED, due soon"}
	lab := &fakeLab{settle: 100 * time.Millisecond, unrest: func() map[string]string {
		n++
		return map[string]string{"queue q": states[n%2]}
	}}
	sum, _ := inBubble(t, lab, small(), nil)
	require.Equal(t, verify.Unknown, sum.Verdict)
	require.Contains(t, findings(only(t, sum), verify.Unknown)[0], "still moving")
}

func TestCountdownIsNoSignOfLife(t *testing.T) {
	n := 0
	lab := &fakeLab{settle: 100 * time.Millisecond, unrest: func() map[string]string {
		n++
		return map[string]string{"queue q": fmt.Sprintf("1 message for %d s", n)}
	}}
	sum, _ := inBubble(t, lab, small(), nil)
	require.Equal(t, verify.Fail, sum.Verdict)
}

func TestPanicInAFaultIsTheHarnessesFault(t *testing.T) {
	for _, where := range []string{"inject", "heal", "witness"} {
		t.Run(where, func(t *testing.T) {
			log := &callLog{}
			other := &fakeFault{name: "other", log: log}
			sum, dir := inBubble(t, &fakeLab{settle: 100 * time.Millisecond},
				small(other, &fakeFault{name: "bad", log: log, panic: where}), nil)
			require.Equal(t, verify.HarnessError, sum.Verdict)
			require.Contains(t, findings(only(t, sum), verify.HarnessError)[0], "planted in "+where)
			require.Equal(t, 1, count(log.calls, "heal other"), "the other fault is healed, once: %v", log.calls)
			require.Equal(t, 1, count(log.calls, "heal bad"), "a fault that broke is healed, once: %v", log.calls)
			require.NotNil(t, loadCell(t, dir).Final, "the evidence is saved all the same")
		})
	}
}

func count(list []string, s string) int {
	n := 0
	for _, l := range list {
		if l == s {
			n++
		}
	}
	return n
}

func TestPartsThatDoNotStartAreAHarnessError(t *testing.T) {
	sum, _ := inBubble(t, &fakeLab{failed: errors.New("no database")}, small(), nil)
	require.Equal(t, verify.HarnessError, sum.Verdict)
	require.Contains(t, findings(only(t, sum), verify.HarnessError)[0], "no database")
}

func TestEvidenceIsOnDiskBeforeItIsJudged(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		clock := func() int64 { return int64(time.Since(began)) + 1_000_000 }
		lab := &fakeLab{settle: 100 * time.Millisecond, clock: clock}
		x := &cellRun{
			runner:   &Runner{Lab: lab, Dir: dir, Seed: 7, Clock: clock, Watch: quietWatcher{}, Again: func(...string) string { return "" }},
			scenario: small(), cell: cellResend(), clock: clock, dir: filepath.Join(dir, "cell"), plan: mustPlan(t, 7, "test", small().Load),
		}
		require.NoError(t, x.open(t.Context()))
		require.NoError(t, x.phases(t.Context()))
		require.NoError(t, x.save(t.Context()))
		require.NoError(t, x.own.save(x.dir))
		// Nothing has judged yet: the judge finds all it needs in the folder.
		require.NoError(t, os.Chmod(x.dir, 0o500))
		result, err := Judge(x.dir)
		require.NoError(t, err)
		require.Equal(t, verify.Pass, result.Verdict, "%v", result.Findings)
		require.NoError(t, os.Chmod(x.dir, 0o700))
	})
}

func TestJudgingAgainGivesTheSameVerdict(t *testing.T) {
	for name, lab := range map[string]*fakeLab{
		"green":   {settle: 100 * time.Millisecond},
		"stalled": {settle: 0},
	} {
		t.Run(name, func(t *testing.T) {
			sum, dir := inBubble(t, lab, small(&fakeFault{name: "a", log: &callLog{}}), nil)
			require.NoError(t, reports.Write(dir, sum))
			again, err := JudgeAgain(dir)
			require.NoError(t, err)
			require.Equal(t, sum.Verdict, again.Verdict)
			require.Equal(t, sum.Scenarios[0].Findings, again.Scenarios[0].Findings)
			require.Equal(t, sum.Scenarios[0].Counts, again.Scenarios[0].Counts)
			require.Equal(t, sum.Scenarios[0].Command, again.Scenarios[0].Command)
		})
	}
}

// editSummary changes the summary of the run that a history belongs to.
func editSummary(change func(*reports.Summary)) func(t *testing.T, history string) {
	return func(t *testing.T, history string) {
		dir := filepath.Dir(filepath.Dir(history))
		sum, err := reports.Read(dir)
		require.NoError(t, err)
		change(&sum)
		require.NoError(t, reports.Write(dir, sum))
	}
}

// Each of these was green once: the verdict of the first judging was kept, or
// what is left of the history does not contradict itself.
func TestJudgingAgainIsNotGreenOnOtherEvidence(t *testing.T) {
	dropFirst := func(kind string) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			lines := strings.SplitAfter(string(text), "\n")
			i := slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, `"kind":"`+kind+`"`) })
			require.NotEqual(t, -1, i)
			require.NoError(t, os.WriteFile(path, []byte(strings.Join(slices.Delete(lines, i, i+1), "")), 0o600))
		}
	}
	for name, damage := range map[string]func(t *testing.T, path string){
		"history gone":  func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) },
		"folder gone":   func(t *testing.T, path string) { require.NoError(t, os.RemoveAll(filepath.Dir(path))) },
		"a phase gone":  dropFirst("phase"),
		"history empty": func(t *testing.T, path string) { require.NoError(t, os.Truncate(path, 0)) },
		"runner's findings taken out": func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "runner.json"), []byte("{}\n"), 0o600))
		},
		"summary without its checksums":         editSummary(func(s *reports.Summary) { s.Scenarios[0].Evidence, s.Scenarios[0].Runner = "", "" }),
		"summary without the runner's checksum": editSummary(func(s *reports.Summary) { s.Scenarios[0].Runner = "" }),
		"cell taken out of the summary":         editSummary(func(s *reports.Summary) { s.Scenarios = nil }),
		"cell called skipped": func(t *testing.T, path string) {
			editSummary(func(s *reports.Summary) { s.Scenarios[0].Verdict = verify.SkippedRun })(t, path)
			require.NoError(t, os.RemoveAll(filepath.Dir(path)))
		},
		"runner's findings gone": func(t *testing.T, path string) { // as an interrupted run leaves it
			require.NoError(t, os.Remove(filepath.Join(filepath.Dir(path), "runner.json")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			sum, dir := inBubble(t, &fakeLab{settle: 100 * time.Millisecond}, small(&fakeFault{name: "a", log: &callLog{}}), nil)
			require.Equal(t, verify.Pass, sum.Verdict)
			require.NoError(t, reports.Write(dir, sum))
			damage(t, filepath.Join(dir, sum.Scenarios[0].Dir, history.FileName))
			for range 2 { // the first judging must not whitewash the second
				again, err := JudgeAgain(dir)
				require.NoError(t, err)
				require.Equal(t, verify.HarnessError, again.Verdict)
				require.NotEmpty(t, findings(only(t, again), verify.HarnessError))
				require.Len(t, slices.Compact(findings(only(t, again), verify.HarnessError)), len(findings(only(t, again), verify.HarnessError)), "told once")
				require.NoError(t, reports.Write(dir, again))
			}
		})
	}
}

func TestInterruptHealsAndIsUnknown(t *testing.T) {
	log := &callLog{}
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		clock := func() int64 { return int64(time.Since(began)) + 1_000_000 }
		lab := &fakeLab{settle: 100 * time.Millisecond, clock: clock}
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("Ctrl-C")
		time.AfterFunc(700*time.Millisecond, func() { cancel(stop) })
		s := small(&fakeFault{name: "a", log: log})
		s.Load.PerSecond = 10
		r := Runner{Lab: lab, Dir: dir, Seed: 7, Clock: clock, Watch: quietWatcher{}, Again: func(...string) string { return "" }}
		sum, err := r.Run(ctx, []Scenario{s, s})
		require.ErrorIs(t, err, stop)
		require.Equal(t, verify.Unknown, sum.Verdict)
		require.Len(t, sum.Scenarios, 1, "no further cell is begun")
		require.True(t, lab.opened[0].closed)
	})
	if slices.Contains(log.calls, "inject a") {
		require.Equal(t, 1, count(log.calls, "heal a"))
	}
}

// beginnings notes when each cell began and ended.
type beginnings struct {
	clock func() int64
	calls []string
	at    map[string]int64
}

func (b *beginnings) Cell(i, n int, s Scenario, c Cell) {
	b.calls = append(b.calls, fmt.Sprintf("%d/%d %s begins", i, n, s.Name))
	b.at[s.Name+" begins"] = b.clock()
}
func (b *beginnings) Status(Status) {}
func (b *beginnings) Done(r reports.Scenario) {
	b.calls = append(b.calls, r.Name+" ends")
	b.at[r.Name+" ends"] = b.clock()
}

func TestACellBesideRunsWithAllOthersAndIsListedInItsPlace(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		clock := func() int64 { return int64(time.Since(began)) + 1_000_000 }
		seen := &beginnings{clock: clock, at: map[string]int64{}}
		named := func(name string, bookings int) Scenario {
			s := small()
			s.Name, s.Load.Bookings, s.Floors.Confirmed = name, bookings, bookings
			return s
		}
		r := Runner{
			Lab: &fakeLab{settle: 100 * time.Millisecond, clock: clock}, Dir: dir, Seed: 7, Clock: clock, Watch: seen,
			Again: func(...string) string { return "" }, Beside: []string{"long/resend"},
		}
		sum, err := r.Run(t.Context(), []Scenario{named("first", 20), named("long", 2000), named("second", 20)})
		require.NoError(t, err)
		require.Equal(t, verify.Pass, sum.Verdict, "%v", sum.Scenarios)
		require.Equal(t, []string{"first", "long", "second"}, []string{sum.Scenarios[0].Name, sum.Scenarios[1].Name, sum.Scenarios[2].Name})
		require.Less(t, seen.at["long begins"], seen.at["first ends"])
		require.Less(t, seen.at["second ends"], seen.at["long ends"])
		require.LessOrEqual(t, seen.at["first ends"], seen.at["second begins"], "the others still run one after another")
		require.Contains(t, seen.calls, "2/3 long begins")
	})
}

func TestAnExclusiveCellHasThePartsForItself(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		clock := func() int64 { return int64(time.Since(began)) + 1_000_000 }
		seen := &beginnings{clock: clock, at: map[string]int64{}}
		named := func(name string, bookings int) Scenario {
			s := small()
			s.Name, s.Load.Bookings, s.Floors.Confirmed = name, bookings, bookings
			return s
		}
		breaks, too := named("breaks", 20), named("breaks too", 20)
		breaks.Exclusive, too.Exclusive = true, true
		r := Runner{
			Lab: &fakeLab{settle: 100 * time.Millisecond, clock: clock}, Dir: dir, Seed: 7, Clock: clock, Watch: seen,
			Again: func(...string) string { return "" }, Beside: []string{"long/resend", "breaks too/resend"},
		}
		sum, err := r.Run(t.Context(), []Scenario{breaks, too, named("long", 2000), named("second", 20)})
		require.NoError(t, err)
		require.Equal(t, verify.Pass, sum.Verdict, "%v", sum.Scenarios)
		require.Equal(t, "breaks", sum.Scenarios[0].Name, "listed in its place")
		require.LessOrEqual(t, seen.at["second ends"], seen.at["breaks begins"])
		require.LessOrEqual(t, seen.at["long ends"], seen.at["breaks begins"])
		require.LessOrEqual(t, seen.at["breaks ends"], seen.at["breaks too begins"], "being named makes it no less exclusive")
	})
}

func TestAnInterruptEndsTheCellBesideToo(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		clock := func() int64 { return int64(time.Since(began)) + 1_000_000 }
		lab := &fakeLab{settle: 100 * time.Millisecond, clock: clock}
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("Ctrl-C")
		time.AfterFunc(700*time.Millisecond, func() { cancel(stop) })
		long, first, never := small(), small(), small()
		long.Name, first.Name, never.Name = "long", "first", "never"
		long.Load.PerSecond, first.Load.PerSecond = 1, 10
		r := Runner{
			Lab: lab, Dir: dir, Seed: 7, Clock: clock, Watch: quietWatcher{},
			Again: func(...string) string { return "" }, Beside: []string{"long/resend"},
		}
		sum, err := r.Run(ctx, []Scenario{long, first, never})
		require.ErrorIs(t, err, stop)
		require.Equal(t, verify.Unknown, sum.Verdict)
		require.Len(t, sum.Scenarios, 2, "no further cell is begun")
		for _, bench := range lab.opened {
			require.True(t, bench.closed)
		}
	})
}
