package scenarios

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"mailproof/fakes/script"
	"mailproof/fakes/smtp"
	"mailproof/history"
	"mailproof/target"
)

// play is one batch's story.
type play struct {
	*strike
	victim target.Process
	cast   []Booking
	// isCaught: the victim has reached the point, and answers nobody.
	isCaught atomic.Bool
}

func (p *play) caught() bool { return p.isCaught.Load() }

// before makes the state that the story needs, undisturbed.
func (p *play) before(ctx context.Context) error {
	switch p.point.Story {
	case pathReplayed, pathDiscarded:
		if err := p.confirmAll(ctx); err != nil {
			return err
		}
		return p.await(ctx, "dead")
	case pathStolen, pathOutdated:
		if err := p.confirmAll(ctx); err != nil {
			return err
		}
		return p.await(ctx, "failed")
	case pathOrphan:
		return p.orphan(ctx)
	}
	return nil
}

// past leads past the point.
func (p *play) past(ctx context.Context) error {
	switch p.point.Story {
	case pathCancelled:
		return p.each(ctx, func(ctx context.Context, b Booking) error {
			if err := p.confirm(ctx, b); err != nil {
				return err
			}
			return p.op(ctx, "cancel", b, func(ctx context.Context) history.OpOutcome { return p.run.target.Cancel(ctx, b.ID) })
		})
	case pathReplayed:
		return p.replay(ctx)
	case pathDiscarded:
		return p.discard(ctx)
	case pathStolen:
		_, err := p.run.target.LoseDoorbells(ctx)
		return err
	case pathOutdated:
		if _, err := p.run.target.LoseDoorbells(ctx); err != nil {
			return err
		}
		_, err := p.run.target.Outdate(ctx, p.keys())
		return err
	case pathOrphan:
		return nil // its lease runs out by itself
	case pathGarbage:
		return p.tell(ctx, func(ctx context.Context, b Booking) error {
			return p.run.target.ProduceGarbage(ctx, b.ID, "no event: "+b.ID)
		})
	case pathBroken:
		return p.tell(ctx, func(ctx context.Context, b Booking) error { return p.run.target.WriteRefusedEvent(ctx, "broken:"+b.ID) })
	}
	if p.point.Story == pathOffer {
		return p.offer(ctx)
	}
	return p.confirmAll(ctx)
}

// unsettled says what the batch still waits for; "" is nothing.
func (p *play) unsettled(ctx context.Context) (string, error) {
	pending, err := p.run.target.Pending(ctx)
	if err != nil {
		return "", err
	}
	for _, key := range slices.Sorted(maps.Keys(pending)) {
		return key + ": " + pending[key], nil
	}
	switch p.point.Story {
	case pathGarbage:
		return p.unparked(ctx)
	case pathBroken:
		return p.undead(ctx)
	}
	return "", nil
}

func (p *play) unparked(ctx context.Context) (string, error) {
	for _, b := range p.cast {
		parked, alerts, err := p.run.target.ParkedLike(ctx, "no event: "+b.ID)
		if err != nil || parked != 1 || alerts != 1 {
			return fmt.Sprintf("record %s is parked %d times, with %d alerts", b.ID, parked, alerts), err
		}
	}
	return "", nil
}

func (p *play) undead(ctx context.Context) (string, error) {
	for _, b := range p.cast {
		dead, err := p.run.target.DeadEvent(ctx, "broken:"+b.ID)
		if err != nil || !dead {
			return "event broken:" + b.ID + " is not dead and alerted", err
		}
	}
	return "", nil
}

func (p *play) keys() []string {
	keys := make([]string, len(p.cast))
	for i, b := range p.cast {
		keys[i] = p.key(b)
	}
	return keys
}

// each does it for all customers side by side.
func (p *play) each(ctx context.Context, do func(context.Context, Booking) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, b := range p.cast {
		g.Go(func() error { return do(ctx, b) })
	}
	return g.Wait()
}

// tell does it for each, one after the other.
func (p *play) tell(ctx context.Context, do func(context.Context, Booking) error) error {
	for _, b := range p.cast {
		if err := do(ctx, b); err != nil {
			return err
		}
	}
	return nil
}

func (p *play) confirmAll(ctx context.Context) error { return p.each(ctx, p.confirm) }

func (p *play) confirm(ctx context.Context, b Booking) error {
	return p.op(ctx, "confirm", b, func(ctx context.Context) history.OpOutcome {
		return p.run.target.Confirm(ctx, b.ID, b.Recipient)
	})
}

// op makes an operation until it is acknowledged, and records each try.
func (p *play) op(ctx context.Context, name string, b Booking, do func(context.Context) history.OpOutcome) error {
	intended := history.Now()
	for deadline := time.Now().Add(crashFind); ; {
		call := history.Now()
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		outcome := do(try)
		cancel()
		returned := history.Now()
		p.run.bench.Record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
			Name: name, Booking: b.ID, Key: p.key(b), Recipient: b.Recipient,
			Intended: intended, Call: call, Return: returned, Outcome: outcome,
		}})
		switch {
		case outcome == history.OpOK:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("%s of %s was not acknowledged within %s", name, b.ID, crashFind)
		case !pause(ctx, tryAgain):
			return ctx.Err()
		}
	}
}

// await waits until each mail of the batch is in that state, and DEAD with its
// dead letter.
func (p *play) await(ctx context.Context, state string) error {
	why := ""
	for deadline := time.Now().Add(crashFind); time.Now().Before(deadline); {
		states, err := p.run.target.States(ctx)
		if err != nil {
			return err
		}
		why = ""
		for _, key := range p.keys() {
			// One that is past it was faster than this look.
			if s := states[key]; s != state && (state == "dead" || s != "sent") {
				why = fmt.Sprintf("%s is %q, not %s", key, s, state)
			}
		}
		if why == "" && state == "dead" {
			why, err = p.unsettled(ctx)
		}
		if why == "" && err == nil {
			return nil
		}
		if !pause(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
	return fmt.Errorf("not within %s: %s", crashFind, why)
}

// orphan kills a worker at DATA: its mail's lease runs out, and nobody may claim
// it under hold.
func (p *play) orphan(ctx context.Context) error {
	mail := p.run.bench.Parts.Mail
	rule, err := mail.AddRule(script.Rule{
		Match:  script.Match{Recipient: pathOrphan + "*"},
		Action: script.Action{Kind: script.HoldUntilReleased, Stage: smtp.StageData, For: script.Duration(time.Minute)}, Count: 1,
	})
	if err != nil {
		return err
	}
	defer mail.RemoveRule(rule)
	if err := p.confirmAll(ctx); err != nil {
		return err
	}
	bounded, cancel := context.WithTimeout(ctx, crashFind)
	defer cancel()
	hold, err := mail.AwaitHold(bounded, func(h script.Hold) bool { return h.Rule == rule })
	if err != nil {
		return fmt.Errorf("no session reached DATA: %w", err)
	}
	defer mail.Release(hold.ID)
	name, _, _ := strings.Cut(hold.Client, ".")
	owner := p.run.bench.Process(name)
	if owner == nil {
		return fmt.Errorf("the session of %q is nobody's", hold.Client)
	}
	if err := owner.Kill(ctx); err != nil {
		return err
	}
	return owner.Restart(ctx)
}

// replayMore is what each replayed mail gets.
const replayMore = 2

// replay asks the chosen process for each mail, and somebody else for those of
// which no answer came: a replay that was cut off is simply run again.
func (p *play) replay(ctx context.Context) error {
	return p.tell(ctx, func(ctx context.Context, b Booking) error {
		return p.op(ctx, "replay", b, func(ctx context.Context) history.OpOutcome {
			_, err := p.run.target.ReplayOne(ctx, p.operator(), p.key(b), replayMore)
			return outcomeOf(err)
		})
	})
}

// operator is the process that is asked: the one that is to pass the point, as
// long as it answers.
func (p *play) operator() string {
	if p.victim.Running() && !p.caught() {
		return p.victim.Name()
	}
	for _, other := range p.run.target.Processes() {
		if other.Name() != p.victim.Name() && strings.HasPrefix(other.Name(), p.point.Process+"-") {
			return other.Name()
		}
	}
	return p.victim.Name()
}

func outcomeOf(err error) history.OpOutcome {
	if err != nil {
		return history.OpUnknown
	}
	return history.OpOK
}

// discard gives each mail up, and brings it back by its name.
func (p *play) discard(ctx context.Context) error {
	return p.tell(ctx, func(ctx context.Context, b Booking) error {
		for deadline := time.Now().Add(crashFind); ; {
			try, cancel := context.WithTimeout(ctx, tryTimeout)
			err := p.run.target.DiscardOne(try, p.operator(), p.key(b))
			cancel()
			if err == nil {
				break
			}
			if time.Now().After(deadline) || !pause(ctx, tryAgain) {
				return err
			}
		}
		return p.op(ctx, "replay", b, func(ctx context.Context) history.OpOutcome {
			_, err := p.run.target.ReplayOne(ctx, p.operator(), p.key(b), replayMore)
			return outcomeOf(err)
		})
	})
}

// offer asks for a campaign's mails, all in one call, until it is acknowledged.
func (p *play) offer(ctx context.Context) error {
	request := target.CampaignRequest{ID: p.campaign()}
	evidence := history.Campaign{ID: request.ID}
	for _, b := range p.cast {
		evidence.Recipients = append(evidence.Recipients, b.Recipient)
		evidence.Keys = append(evidence.Keys, p.key(b))
	}
	request.Recipients = slices.Values(evidence.Recipients)
	intended := history.Now()
	for deadline := time.Now().Add(crashFind); ; {
		request.Process = p.operator()
		call := history.Now()
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		result, outcome, err := p.run.target.CampaignWhy(try, request)
		cancel()
		returned, answered := history.Now(), evidence
		answered.New, answered.Known = result.New, result.Known
		p.run.bench.Record(history.Record{T: returned, Kind: history.KindOp, Op: &history.Op{
			Name: "campaign", Key: request.ID, Intended: intended, Call: call, Return: returned, Outcome: outcome, Campaign: &answered,
		}})
		switch {
		case outcome == history.OpOK:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("campaign %s was not acknowledged within %s: %w", request.ID, crashFind, err)
		case !pause(ctx, tryAgain):
			return ctx.Err()
		}
	}
}
