package scenarios

import (
	"context"
	"errors"
	"fmt"
	"time"

	"mailproof/fakes/resendapi"
	"mailproof/fakes/script"
	"mailproof/faults"
	"mailproof/history"
	"mailproof/verify"
)

// webhooks is T6.7 under hold over an HTTP API: each mail whose answer was lost
// becomes UNKNOWN, and what became of it is told by the provider's webhooks,
// half of which are lost, or read in its list. Some mails come back, and the
// booking service is told.
func webhooks() Scenario {
	s := reconciled()
	s.Name = "lab-webhooks"
	s.Title = "the 200 is lost; webhooks, many of them lost too, and the provider's list tell what became of the mail"
	s.Proves = []string{"OB-07", "A2-14"}
	s.Cells = []Cell{cellHoldHTTP()}
	// So seldom that webhooks have their turn.
	s.System.ReconcileEvery = 3 * time.Second
	s.FaultNames = append(s.FaultNames, faultWebhooks)
	s.Floors.Faults = len(s.FaultNames)
	s.Judge = judgeWebhooks
	lose := s.Faults
	s.Faults = func(b *Bench) []faults.Fault { return append(lose(b), newHooking(b)) }
	return s
}

const faultWebhooks = "lose-webhooks"

// returned is how many mails come back.
const returned = 20

// hookServer is a mail server that sends webhooks.
type hookServer interface {
	faults.MailServer
	Deliveries() []resendapi.Delivery
	Advance(d time.Duration)
}

// counting is a target whose mail service counts what it did.
type counting interface {
	canceller
	Counted(ctx context.Context, process, metric string) (float64, error)
}

// hooking loses, doubles and forges webhooks, and lets some mails bounce.
type hooking struct {
	bench  *Bench
	server hookServer // nil: the mail server sends none
	target counting   // nil: the target tells nobody
	back   []Booking
	rules  []string
}

func newHooking(b *Bench) *hooking {
	h := &hooking{bench: b, back: b.Plan.Faults[:min(returned, len(b.Plan.Faults))]}
	h.server, _ = b.Parts.Mail.(hookServer)
	h.target, _ = b.Target.(counting)
	return h
}

func (*hooking) Name() string   { return faultWebhooks }
func (*hooking) Target() string { return "mail API" }

func (h *hooking) Available() error {
	if h.server == nil || h.target == nil {
		return errors.New("the mail server sends no webhooks, or nobody is told of mails")
	}
	return nil
}

func (h *hooking) Inject(context.Context) error {
	rules := []script.Rule{
		resendapi.On(resendapi.StageWebhook, resendapi.Drop).Header(":type", "email.delivered").Chance(0.5).Rule(),
		resendapi.On(resendapi.StageWebhook, resendapi.Duplicate).Chance(0.3).Rule(),
		resendapi.On(resendapi.StageWebhook, resendapi.BadSignature).First(1).Chance(0.2).Rule(),
	}
	for _, b := range h.back {
		rules = append(rules, resendapi.On(resendapi.StageLifecycle, resendapi.Bounce).To(b.Recipient).Rule())
	}
	for _, r := range rules {
		id, err := h.server.AddRule(r)
		if err != nil {
			return err
		}
		h.rules = append(h.rules, id)
	}
	return nil
}

func (h *hooking) Heal(context.Context) error {
	for _, id := range h.rules {
		h.server.RemoveRule(id)
	}
	return nil
}

// Witness counts what became of the webhooks, and asks the booking service of
// the mails that came back.
func (h *hooking) Witness(ctx context.Context) (faults.Witness, error) {
	// What was put off for minutes comes now: that is the provider's clock.
	h.server.Advance(time.Hour)
	lost, heard, refused := 0, 0, 0
	for _, d := range h.server.Deliveries() {
		switch {
		case d.Status >= 200 && d.Status < 300:
			heard++
		case d.Status == 401:
			refused++
		case d.Status == 0:
			lost++
		}
	}
	keys, err := h.awaitTold(ctx)
	if err != nil {
		return faults.Witness{}, err
	}
	told, err := h.target.Counted(ctx, "notifyd-1", `notifyd_webhooks_total{result="found"}`)
	if err != nil {
		return faults.Witness{}, err
	}
	listed, err := h.target.Counted(ctx, "notifyd-1", `notifyd_reconciled_total{result="found"}`)
	if err != nil {
		return faults.Witness{}, err
	}
	if told == 0 || listed == 0 {
		return faults.Witness{}, fmt.Errorf("of the UNKNOWN mails %v were settled by a webhook, %v by the list: each must happen", told, listed)
	}
	if lost == 0 || heard == 0 || refused == 0 {
		return faults.Witness{}, fmt.Errorf("of the webhooks %d were lost, %d heard, %d refused as forged: each must happen", lost, heard, refused)
	}
	return faults.Witness{
		Text: fmt.Sprintf("%d webhooks were lost, %d heard, %d refused as forged; UNKNOWN mails settled by a webhook %v, by the list %v; %d mails came back",
			lost, heard, refused, told, listed, len(h.back)),
		Count: lost, Keys: keys,
	}, nil
}

// awaitTold asks the booking service of each mail that came back, until it knows
// of that or toldBound is over: a bounce that is never told is the system's. An
// error says that it could not be asked.
func (h *hooking) awaitTold(ctx context.Context) ([]string, error) {
	deadline := time.Now().Add(toldBound)
	keys := make([]string, len(h.back))
	for i, b := range h.back {
		keys[i] = h.bench.Target.Key(b.ID, 1)
		for {
			status, err := h.target.MailTold(ctx, b.ID)
			if err != nil {
				return nil, fmt.Errorf("what is told of the mail of %s: %w", b.Recipient, err)
			}
			if status == bounced {
				break
			}
			if time.Now().After(deadline) {
				h.bench.Find(verify.Fail, bouncesAreTold, keys[i], fmt.Sprintf("it came back, and %s later the booking service still tells %q", toldBound, status))
				break
			}
			if !pause(ctx, 100*time.Millisecond) {
				return nil, ctx.Err()
			}
		}
	}
	return keys, nil
}

const (
	bounced        = "bounced" // what the booking service tells of a mail that came back
	bouncesAreTold = "bounces-are-told"
)

// judgeWebhooks is judgeReconciled, and tells of the bounces that were asked for
// while the system ran.
func judgeWebhooks(h *history.History, own *ownFindings) {
	judgeReconciled(h, own)
	asked := 0
	for _, f := range h.Faults {
		if f.Name == faultWebhooks {
			asked = len(f.Keys)
		}
	}
	own.check(bouncesAreTold, "Of each mail that came back the booking service is told (A2-14).", asked)
}
