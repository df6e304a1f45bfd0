package scenarios

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/faults"
	"mailproof/history"
	"mailproof/target"
)

// dlqReplay is T6.8: the server refuses everything until every mail is DEAD with
// its letter and alert; then it is healed and two people replay all of them at
// the same moment, and a third one afterwards (AC7). Each mail goes out once.
func dlqReplay() Scenario {
	s := Scenario{
		Name:       "t6.8",
		Title:      "every mail is dead; the server is healed and three people replay them",
		Proves:     []string{"AC7", "M6-04", "M6-14", "TRAP-M6-10", "CASE-5"},
		Cells:      []Cell{cellResend()},
		Floors:     history.Floors{Confirmed: 500, Faults: 1},
		Invariants: everyMail(),
		System:     fast(),
		Load:       Load{Baseline: 20, Bookings: 520, PerSecond: 40},
		FaultNames: []string{faultReplays},
		Quiesce:    90 * time.Second,
		Expect:     70 * time.Second,
	}
	s.System.MaxAttempts, s.System.RetryDelays = 2, []time.Duration{time.Second}
	// A letter that a worker wrote while its mail was being replayed, or that
	// one replay held while the next one looked, is cleared by the service.
	s.System.LettersEvery = time.Second
	s.Faults = func(b *Bench) []faults.Fault { return []faults.Fault{newReplays(b)} }
	return s
}

const faultReplays = "dead-then-replayed"

const (
	// deadBound is how long the last mail may take to be DEAD.
	deadBound = 2 * time.Minute
	// replayTries is what each replayed mail gets.
	replayTries = 2
	// replayPace of the slower one of the two, so that they overlap.
	replayPace = 200
)

// replayer is a target whose dead mails can be replayed; the pipeline is one.
type replayer interface {
	DeadCount(ctx context.Context) (int, error)
	ReplayDead(ctx context.Context, attempts int, rate float64) (target.ReplayReport, error)
}

// replays is the refusal and what people do after it, as a campaign.
type replays struct {
	bench  *Bench
	target replayer
	done   chan struct{}
	stop   context.CancelFunc
	rule   string

	mu      sync.Mutex
	err     error
	reports []target.ReplayReport
}

func newReplays(b *Bench) *replays {
	r := &replays{bench: b, done: make(chan struct{})}
	r.target, _ = b.Target.(replayer)
	return r
}

func (*replays) Name() string { return faultReplays }

func (r *replays) Available() error {
	if r.target == nil {
		return errors.New("the target's dead mails cannot be replayed")
	}
	return nil
}

func (r *replays) Done() <-chan struct{} { return r.done }

func (r *replays) Progress() (struck, of int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.reports), 3
}

// Inject refuses every recipient from now on.
func (r *replays) Inject(ctx context.Context) (err error) {
	r.rule, err = r.bench.Parts.Mail.AddRule(script.Rule{
		Action: script.Action{Kind: script.Reply, Stage: smtp.StageRcpt, Code: 451, Enhanced: "4.3.0", Text: "not now"},
	})
	if err != nil {
		return fmt.Errorf("refusing all recipients: %w", err)
	}
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(r.done)
		err := r.play(ctx)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.err = err
	}()
	return nil
}

func (r *replays) play(ctx context.Context) error {
	if err := r.awaitDead(ctx); err != nil {
		return err
	}
	r.bench.Parts.Mail.RemoveRule(r.rule)
	errs := make(chan error, 2)
	for _, pace := range []float64{replayPace, 0} {
		go func() { errs <- r.replay(ctx, pace) }()
	}
	if err := errors.Join(<-errs, <-errs); err != nil {
		return err
	}
	return r.replay(ctx, 0)
}

// awaitDead waits until each mail that the workload asked for is DEAD.
func (r *replays) awaitDead(ctx context.Context) error {
	want, dead := len(r.bench.Plan.Faults), 0
	for deadline := time.Now().Add(deadBound); time.Now().Before(deadline); {
		var err error
		if dead, err = r.target.DeadCount(ctx); err != nil {
			return err
		}
		if dead >= want {
			return nil
		}
		if !pause(ctx, restPoll) {
			return ctx.Err()
		}
	}
	return fmt.Errorf("%d of %d mails were dead after %s", dead, want, deadBound)
}

// replay is one person's, an operation on every mail.
func (r *replays) replay(ctx context.Context, pace float64) error {
	call := history.Now()
	report, err := r.target.ReplayDead(ctx, replayTries, pace)
	returned := history.Now()
	outcome := history.OpOK
	if err != nil {
		outcome = history.OpUnknown
	}
	for _, b := range r.bench.Plan.Faults {
		r.bench.Record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
			Name: "replay", Booking: b.ID, Key: r.bench.Target.Key(b.ID, 1), Recipient: b.Recipient,
			Intended: call, Call: call, Return: returned, Outcome: outcome,
		}})
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports = append(r.reports, report)
	return nil
}

// Heal ends the refusal, and people who are still at it.
func (r *replays) Heal(ctx context.Context) error {
	if r.stop == nil {
		return nil
	}
	r.bench.Parts.Mail.RemoveRule(r.rule)
	r.stop()
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Witness wants each mail moved by exactly one of the three.
func (r *replays) Witness(context.Context) (faults.Witness, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return faults.Witness{}, r.err
	}
	want, moved, text := len(r.bench.Plan.Faults), 0, ""
	for _, report := range r.reports {
		moved += report.Replayed
		text += fmt.Sprintf("; %d found, %d replayed, %d were another's", report.Matched, report.Replayed, report.Refused)
	}
	if moved != want {
		return faults.Witness{}, fmt.Errorf("%d dead mails, and %d replayed%s", want, moved, text)
	}
	return faults.Witness{Text: fmt.Sprintf("%d dead mails%s", want, text), Count: want}, nil
}
