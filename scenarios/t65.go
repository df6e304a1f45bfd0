package scenarios

import (
	"context"
	"fmt"
	"slices"
	"time"

	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

const (
	faultLeaderKilled = "rabbitmq-leader-killed"
	faultLeaderCutOff = "rabbitmq-leader-cut-off"
	// goneBound is how long the leader is left away at most. A new AMQP channel
	// was seen to wait for 70 s where a leader had stopped without a word.
	goneBound = 90 * time.Second
	// carriedMeanwhile mails are to be delivered while it is away: more than may
	// have been with a worker already.
	carriedMeanwhile = 100
)

// leaderLost is T6.5: the RabbitMQ node that leads the ticket queue dies, and
// comes back when the others have gone on without it; then the leader of that
// moment is cut off from its peers, steps aside as a minority, and joins again.
// Nothing that was confirmed may be lost with either, and the queue must outlive
// both: a queue that is on one node alone does not (TRAP-M6-5).
func leaderLost() Scenario {
	s := partScenario("t6.5", "the leader of the ticket queue is killed, then cut off from its peers",
		faultLeaderKilled, faultLeaderCutOff)
	s.Proves = []string{"T6.5", "M6-12", "TRAP-M6-5", "AC2"}
	parts := judgeParts()
	s.Judge = func(h *history.History, own *ownFindings) {
		parts(h, own)
		judgeOutlived(h, own)
	}
	s.Faults = func(b *Bench) []faults.Fault {
		return b.inTurn(faults.LeaderKilled(b.cluster(), b.carriedOn), faults.LeaderCutOff(b.cluster(), b.carriedOn))
	}
	return s
}

// carriedOn returns when the system has delivered carriedMeanwhile more mails,
// or after goneBound: whether it has is judged from the evidence.
func (b *Bench) carriedOn(ctx context.Context) error {
	before := b.Stored()
	for end := time.Now().Add(goneBound); time.Now().Before(end); {
		if b.Stored() >= before+carriedMeanwhile {
			return nil
		}
		if !pause(ctx, healedPoll) {
			return ctx.Err()
		}
	}
	return nil
}

// judgeOutlived wants mails that were confirmed after the leader had gone to be
// delivered before it came back.
func judgeOutlived(h *history.History, own *ownFindings) {
	const name = "outlives-leader"
	confirmed := map[string]int64{}
	for _, op := range h.Ops {
		if op.Name == "confirm" {
			confirmed[op.Key] = max(confirmed[op.Key], op.Call)
		}
	}
	meanwhile := func(f history.Fault) (n int) {
		for _, a := range h.Attempts {
			if at, ok := confirmed[a.Key]; ok && a.Stored && at >= f.Start && a.DotAt <= f.End {
				n++
			}
		}
		return n
	}
	gone := slices.DeleteFunc(slices.Clone(h.Faults), func(f history.Fault) bool {
		return f.Name != faultLeaderKilled && f.Name != faultLeaderCutOff
	})
	own.check(name, "The tickets' queue goes on without the node that led it: mails that are confirmed while it is away are delivered while it is away.", len(gone))
	for _, f := range gone {
		if n := meanwhile(f); n == 0 {
			own.find(verify.Fail, name, "", fmt.Sprintf("no mail that was confirmed after %s had begun was delivered in the %.1f s until it ended",
				f.Name, time.Duration(f.End-f.Start).Seconds()))
		} else {
			own.measure("confirmed and delivered during "+f.Name, float64(n), "", "")
		}
	}
}
