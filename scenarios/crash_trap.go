package scenarios

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/target"
)

// trap catches a process at a point.
type trap struct {
	// await returns the witness once the process is there: dead, stopped, or with
	// a session held. "" means that it did not come by in time.
	await func(ctx context.Context) (string, error)
	// dead returns when the process has died there.
	dead func(ctx context.Context) error
	// stopped returns when it stands still there, if it stops by itself.
	stopped func(ctx context.Context) error
	// disarm lets others pass. Safe to call twice.
	disarm func()
}

func (s *strike) arm(ctx context.Context, victim target.Process, passage int) (trap, error) {
	if s.point.stage != "" {
		return s.armServer(ctx, victim)
	}
	return s.armBuild(victim, passage)
}

// armBuild uses a crash point of the tagged build.
func (s *strike) armBuild(victim target.Process, passage int) (trap, error) {
	points := s.run.target.CrashPoints(victim.Name())
	action := map[string]string{actKill: "kill", actPause: "stop"}[s.act]
	if err := points.Arm(s.point.Name, action, passage); err != nil {
		return trap{}, err
	}
	return trap{
		await: func(ctx context.Context) (string, error) {
			hit, err := awaitHit(ctx, points, s.hitWait())
			if errors.Is(err, context.DeadlineExceeded) {
				// What was about to act when it was disarmed acts, and is heard of.
				if err := points.Disarm(); err != nil {
					return "", err
				}
				hit, err = awaitLate(ctx, points)
			}
			if errors.Is(err, context.DeadlineExceeded) {
				return "", nil
			}
			if err != nil {
				return "", err
			}
			if hit.Point != s.point.Name || hit.Action != action {
				return "", fmt.Errorf("armed for %s at %s, and heard of %s", action, s.point.Name, hit)
			}
			return hit.String(), nil
		},
		dead: points.AwaitDeath, stopped: points.AwaitStop,
		disarm: func() {
			_ = points.Disarm() // a file that cannot be written makes the next Arm fail
		},
	}, nil
}

func awaitHit(ctx context.Context, points *target.CrashPoints, bound time.Duration) (target.Hit, error) {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	return points.Await(ctx)
}

// hitWait is how long a batch may take to reach the point. The Kafka client asks
// for a topic that it does not know at most every five seconds, and twice for one
// that is refused.
func (s *strike) hitWait() time.Duration {
	switch {
	case s.point.Story == pathBroken:
		return 5 * hitWait
	case s.point.Story == pathOrphan && strings.HasPrefix(s.point.Name, "reconciler."):
		return 4 * hitWait // an absence is proven a lease and a session later
	}
	return hitWait
}

// lateHit is how long a process takes from reading an order to telling of it.
const lateHit = 200 * time.Millisecond

func awaitLate(ctx context.Context, points *target.CrashPoints) (target.Hit, error) {
	ctx, cancel := context.WithTimeout(ctx, lateHit)
	defer cancel()
	return points.Await(ctx)
}

// armServer makes the mail server hold the process's next session at the stage.
func (s *strike) armServer(ctx context.Context, victim target.Process) (trap, error) {
	mail := s.run.bench.Parts.Mail
	if s.point.stage == smtp.StageEHLO {
		// A process keeps its connections: only a new one passes here.
		if err := victim.Restart(ctx); err != nil {
			return trap{}, err
		}
	}
	action := script.Action{Kind: script.HoldUntilReleased, Stage: s.point.stage, For: script.Duration(time.Minute)}
	if s.point.stage == smtp.StageBody {
		action.Bytes = 64 // somewhere inside the headers
	}
	rule, err := mail.AddRule(script.Rule{Match: script.Match{Client: victim.Name() + ".*", Recipient: s.recipients()}, Action: action, Count: 1})
	if err != nil {
		return trap{}, err
	}
	var hold script.Hold
	return trap{
		await: func(ctx context.Context) (string, error) {
			ctx, cancel := context.WithTimeout(ctx, s.hitWait())
			defer cancel()
			hold, err = mail.AwaitHold(ctx, func(h script.Hold) bool { return h.Rule == rule })
			if errors.Is(err, context.DeadlineExceeded) {
				return "", nil
			}
			if err != nil {
				return "", err
			}
			return fmt.Sprintf("process %d had its session %d (%s) held at %s", victim.PID(), hold.Session, hold.Client, hold.Stage), nil
		},
		dead:    func(ctx context.Context) error { return victim.Kill(ctx) },
		stopped: func(context.Context) error { return nil },
		disarm: func() {
			mail.RemoveRule(rule)
			mail.Release(hold.ID) // into the socket of a process that is dead or stopped
		},
	}, nil
}

// recipients of the story; before RCPT the server knows none.
func (s *strike) recipients() string {
	if s.point.stage == smtp.StageEHLO || s.point.stage == smtp.StageMail {
		return ""
	}
	return s.point.Story + "*"
}

// draw draws a batch.
func (s *strike) draw(r *rand.Rand) []Booking {
	n := crashBatch
	if s.point.Story == pathBroken {
		n = 1 // each takes its time: see hitWait
	}
	cast := make([]Booking, n)
	for i := range cast {
		id := drawUUID(r)
		cast[i] = Booking{ID: id, Recipient: fmt.Sprintf("%s.%s@customers.test", s.point.Story, id[:8])}
	}
	return cast
}
